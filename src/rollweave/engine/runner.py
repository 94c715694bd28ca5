"""Computes one step plan: gathers its tokens into one flat batch, runs the model, and
returns the logits of the entries that sample.

It owns the model, the paged pool and the mirror. The planner's entries name blocks;
this module maps them to memory.
"""

from pathlib import Path

import torch

from rollweave.engine.attention import Attention, Chunk
from rollweave.engine.kv import DenseMirror, PagedPool
from rollweave.engine.model import Batch, Decoder
from rollweave.engine.planner.batching import Entry, StepPlan
from rollweave.io.device import device_named, give_back_memory
from rollweave.schema.errors import ConfigError, WeightsError
from rollweave.schema.serving import EngineSpec
from rollweave.weights.adapters import AdapterBase
from rollweave.weights.checkpoint import ModelShape, read_shape, read_tensors_of


class Runner:
    """The torch half of an engine, built from a checkpoint directory.

    Raises ConfigError if the directory or the spec is not usable.
    """

    def __init__(self, spec: EngineSpec) -> None:
        directory = Path(spec.model)
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
        self.pool = PagedPool(
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
        self.attention = Attention(self.shape, self.pool, self.mirror, tiles=spec.deterministic)

    def release(self) -> None:
        """Give back the memory of weights and KV. Nothing can be computed until
        `reclaim`.
        """
        self.released = True
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

    def compute(
        self, plan: StepPlan
    ) -> tuple[list[Entry], torch.Tensor, list[tuple[Entry, int, list[float]]]]:
        """Compute the plan's tokens.

        Return the entries that sample now, their logits [entries, vocab] in fp32, and
        for each chunk of a prompt that is scored the position of the first token after
        it was begun, and the log-probs of the tokens from there on.
        """
        decode = plan.decode
        mirrored = 0
        if self.mirror is not None and self.mirror.place(decode):
            decode = self.mirror.rows
            mirrored = len(decode)
        chunks = [Chunk(entry, entry.computed, 1, row) for row, entry in enumerate(decode)]
        ids = [entry.tokens[entry.computed] for entry in decode]
        positions = [entry.computed for entry in decode]
        entries = list(decode)
        sampled = list(range(len(decode)))
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
        logits = self.model.forward(
            batch, self.attention, self.attention.plan(chunks, mirrored=mirrored)
        )
        if not scored:
            return entries, logits, []
        return entries, logits[: len(entries)], _scores(scored, logits[len(entries) :])


def _scores(
    scored: list[tuple[Entry, range, int]], logits: torch.Tensor
) -> list[tuple[Entry, int, list[float]]]:
    """Return the log-probs of the tokens at these positions, from logits [positions,
    vocab].
    """
    tokens = [entry.tokens[at] for entry, positions, _ in scored for at in positions]
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    logprobs = (logits.gather(1, chosen).squeeze(1) - logits.logsumexp(1)).tolist()
    scores = []
    for entry, positions, _ in scored:
        scores.append((entry, positions.start, logprobs[: len(positions)]))
        del logprobs[: len(positions)]
    return scores
