"""Computes one step plan: gathers its tokens into one flat batch, runs the model, and
returns the logits of the entries that sample.

It owns the model, the paged pool and the mirror, and chooses how attention is computed.
The planner's entries name blocks; this module maps them to memory.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rollweave.engine.attention import Attention, Chunk, GatheredAttention
from rollweave.engine.batching import Entry, StepPlan
from rollweave.engine.cuda_graphs import CudaRecorder, DecodeGraphs
from rollweave.engine.kv import DenseMirror, PagedPool
from rollweave.engine.model import Batch, Decoder, DecoderWeights
from rollweave.engine.paged_attention import CHECK_TOLERANCE, PagedAttention, obstacle
from rollweave.engine.sampler import likeliest
from rollweave.io.machine import device_named, give_back_memory
from rollweave.schema.errors import ConfigError, WeightsError
from rollweave.schema.serving import STATE_WIDTH, EngineSpec, TokenChances
from rollweave.weights.adapters import AdapterBase
from rollweave.weights.checkpoint import ModelShape, read_shape, read_tensors_of

_log = logging.getLogger(__name__)

STATE_SEED = 0x5747


def projection(hidden: int) -> torch.Tensor:
    """Return the matrix [hidden, STATE_WIDTH] by which a last hidden state becomes a
    turn's state. It is pseudo-random and keeps distances approximately; it depends on
    the size alone, so that the states of all engines of a run can be compared.
    """
    # the numbers of this generator are the same in every version of NumPy
    normal = np.random.RandomState(STATE_SEED).standard_normal((hidden, STATE_WIDTH))
    return torch.from_numpy(normal / hidden**0.5).float()


class PromptScores(NamedTuple):
    """The log-probs of a prompt's tokens from position `start` on, and the likeliest
    tokens at each place, if they are wanted.
    """

    entry: Entry
    start: int
    logprobs: list[float]
    tops: list[TokenChances]


class Runner:
    """The torch half of an engine, built from a checkpoint directory. `make_pool`
    returns the pool of its blocks.

    Raises ConfigError if the directory or the spec is not usable.
    """

    def __init__(self, spec: EngineSpec, make_pool: Callable[..., PagedPool] = PagedPool) -> None:
        directory, self._spec = Path(spec.model), spec
        self.shape: ModelShape = read_shape(directory)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(spec.dtype)
        if dtype is None:
            raise ConfigError(f"dtype must be float32 or bfloat16, got {spec.dtype!r}")
        if spec.kv_tokens < spec.block_tokens or spec.block_tokens < 1:
            raise ConfigError(
                f"kv_tokens must hold a block of {spec.block_tokens} tokens, got {spec.kv_tokens}"
            )
        device = device_named(spec.device)
        self.released = spec.released
        self.model = Decoder(
            self.shape,
            device=device,
            dtype=dtype,
            tiles=spec.deterministic,
            released=spec.released,
        )
        if not spec.released or spec.lora_scale is not None:
            tensors = dict(read_tensors_of(directory))
            self.model.check(tensors)
            if not spec.released:
                self.model.weights.load(tensors.items())
            if spec.lora_scale is not None:
                self.model.base = AdapterBase(tensors, self.shape, scale=spec.lora_scale)
        self.pool = make_pool(
            self.shape,
            blocks=spec.kv_tokens // spec.block_tokens,
            block_tokens=spec.block_tokens,
            device=device,
            dtype=dtype,
            released=spec.released,
        )
        # The mirror keeps attention scores in the model's dtype, which is too coarse
        # below fp32.
        dense = device.type == "cpu" and dtype is torch.float32 and not spec.deterministic
        self.mirror = DenseMirror(self.shape, self.pool, budget=spec.kv_tokens) if dense else None
        self.attention: Attention[Any] = GatheredAttention(
            self.shape, self.pool, self.mirror, tiles=spec.deterministic
        )
        self.graphs: DecodeGraphs | None = None
        self._projection = projection(self.shape.hidden).to(device) if spec.states else None
        self._hidden: torch.Tensor | None = None
        """The last hidden states of the entries of the last step that sampled, [entries
        or more, hidden], if the engine computes states.
        """
        self._accelerated = not spec.released
        if self._accelerated:
            self._accelerate()

    def _accelerate(self) -> None:
        """Replace the attention on a GPU by the kernel that reads the pool, if it gives
        the same values, and prepare CUDA graphs of decoding steps.
        """
        spec, pool = self._spec, self.pool
        if not self.on_gpu or spec.deterministic or not spec.paged_attention:
            return
        rows, context = spec.max_slots, min(self.shape.context, pool.tokens)
        reason = obstacle(self.shape, pool)
        if not reason:
            try:
                paged = PagedAttention(self.shape, pool, max_rows=rows, context=context)
                difference = paged.difference(self.attention)
                if difference > CHECK_TOLERANCE[self.model.dtype]:
                    reason = f"its values differ by {difference:.2g}"
            except Exception as error:  # any of torch's compilers may fail
                reason = f"{type(error).__name__}: {error}"
        if reason:
            _log.warning("FlexAttention is not used: %s", reason)
            return
        self.attention = paged
        if spec.cuda_graphs:
            self.graphs = DecodeGraphs(
                self.model,
                paged,
                max_rows=rows,
                context=context,
                recorder=lambda: CudaRecorder(pool.device),
                states=spec.states,
            )

    def update(self, staged: DecoderWeights) -> None:
        """Compute with these weights from now on. Graphs read them at the place of the
        former ones, to which they are copied.
        """
        self.model.update(staged, in_place=self.graphs is not None)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # the caller frees their memory

    @property
    def on_gpu(self) -> bool:
        return self.pool.device.type == "cuda"

    def release(self) -> None:
        """Give back the memory of weights and KV. Nothing can be computed until
        `reclaim`.
        """
        self.released = True
        self._hidden = None
        if self.graphs is not None:
            self.graphs.clear()
        self.model.release()
        self.pool.release()
        if self.mirror is not None:
            self.mirror.forget(memory=True)
        give_back_memory(self.model.device)

    def reclaim(self) -> None:
        """Take this memory again, without content.

        Raises WeightsError, with nothing changed, if there is no room.
        """
        try:
            self.model.weights = self.model.allocate()
            self.pool.allocate()
        except RuntimeError as error:
            self.release()
            raise WeightsError(f"no room for weights and KV: {error}") from error
        self.released = False
        if not self._accelerated:
            self._accelerated = True
            self._accelerate()

    def drop(self, entry: Entry) -> None:
        """Release what is kept for `entry`, which gave up its slot."""
        if self.mirror is not None:
            self.mirror.drop(entry)

    def forget(self, *, wipe: bool) -> None:
        """Drop all KV, because the weights have changed.

        `wipe` also clears the memory, which may hold values that are not finite.
        """
        if self.mirror is not None:
            self.mirror.forget(memory=wipe)
        if wipe:
            self.pool.clear()

    def compute(self, plan: StepPlan) -> tuple[list[Entry], torch.Tensor, list[PromptScores]]:
        """Compute the plan's tokens.

        Return the entries that sample now, their logits [entries, vocab] in fp32, and
        the scores of each chunk of a prompt that is scored, from the first token after
        it was begun.
        """
        rows = self.attention.rows(plan.decode)
        entries = rows[: len(plan.decode)]
        if self.graphs is not None and not plan.prefill:
            logits = self._replayed(rows)
            if logits is not None:
                return entries, logits[: len(entries)], []
        chunks = [Chunk(entry, entry.computed, 1, row) for row, entry in enumerate(rows)]
        ids = [entry.tokens[entry.computed] for entry in rows]
        positions = [entry.computed for entry in rows]
        sampled = list(range(len(entries)))
        scored: list[tuple[Entry, range, int]] = []
        for entry, count in plan.prefill:
            start, end = entry.computed, entry.computed + count
            chunks.append(Chunk(entry, start, count, len(ids)))
            if start + 1 < entry.scored:
                scored.append((entry, range(start + 1, min(end + 1, entry.scored)), len(ids)))
            ids.extend(entry.tokens[start:end])
            positions.extend(range(start, end))
            if end == len(entry.tokens):
                entries.append(entry)
                sampled.append(len(ids) - 1)
        for _, positions_, row in scored:
            sampled.extend(range(row, row + len(positions_)))
        device = self.model.device
        batch = Batch(
            ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            longest=max(positions) + 1,
            sampled=torch.tensor(sampled, dtype=torch.int64, device=device)
            if scored or len(sampled) < len(ids)
            else None,
        )
        hidden = self.model.forward(
            batch, self.attention, self.attention.plan(chunks, rows=len(rows))
        )
        if self._projection is not None:
            self._hidden = hidden
        logits = self.model.logits(hidden)
        if not scored:
            return entries, logits, []
        return entries, logits[: len(entries)], _scores(scored, logits[len(entries) :])

    def state(self, row: int) -> tuple[float, ...]:
        """Return the state of a turn that ends with what entry `row` of the last step
        samples: its last hidden state times `projection`, in float16. It is empty
        unless the engine computes states.
        """
        if self._projection is None or self._hidden is None:
            return ()
        state = self._hidden[row].float() @ self._projection
        return tuple(state.half().tolist())

    def _replayed(self, rows: Sequence[Entry]) -> torch.Tensor | None:
        """Return the logits of a decoding step from its graph; None if it cannot be
        recorded, and then no other step is.
        """
        assert self.graphs is not None
        try:
            logits = self.graphs.compute(rows)
            if self._projection is not None:
                self._hidden = self.graphs.hidden
            return logits
        except RuntimeError as error:
            self.graphs = None
            _log.warning("CUDA graphs are not used: %s: %s", type(error).__name__, error)
            return None


def _scores(scored: list[tuple[Entry, range, int]], logits: torch.Tensor) -> list[PromptScores]:
    """Return the scores of the tokens at these positions, from logits [positions,
    vocab].
    """
    tokens = [entry.tokens[at] for entry, positions, _ in scored for at in positions]
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    logprobs = (logits.gather(1, chosen).squeeze(1) - logits.logsumexp(1)).tolist()
    scores, first = [], 0
    for entry, positions, _ in scored:
        last = first + len(positions)
        tops = []
        if entry.scored_top:
            tops = likeliest(logits[first:last].log_softmax(1), entry.scored_top)
        scores.append(PromptScores(entry, positions.start, logprobs[first:last], tops))
        first = last
    return scores
