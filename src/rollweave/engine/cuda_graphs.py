"""Decoding steps as CUDA graphs: a step is recorded once for each number of rows, and
then replayed by one call, so that the GPU does not wait for the launches of its
kernels.

A graph reads and writes memory at fixed addresses. The inputs of a step are therefore
written into buffers (tokens and positions here, slots and blocks in
`PagedAttention`), weights are updated in place (`Decoder.update`), and the rotations
are computed up to the longest context. Graphs are dropped if the weights or the pool
are at another place than when they were recorded: after the engine has given back its
memory. A graph writes logits, and, if the engine computes states of turns, the last
hidden states, to a buffer of their own.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from rollweave.engine.attention import Chunk
from rollweave.engine.batching import Entry
from rollweave.engine.model import Batch, Decoder, DecoderWeights
from rollweave.engine.paged_attention import CHECK_TOLERANCE, PagedAttention, padded_rows


class Recorder(Protocol):
    """Records what a function computes."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that computes the same again from what is then at the same
        addresses. `work` is called any number of times.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs, which share their temporary memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            work()  # compiles kernels, and allocates the workspaces of libraries
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, which stage weights and move KV, use the GPU in the meantime.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay


class DecodeGraphs:
    """The recorded decoding steps of one engine, of at most `max_rows` sequences. With
    `states`, they also give the last hidden states.

    `recorder` is called for a new recorder whenever all graphs have been dropped.
    """

    def __init__(
        self,
        model: Decoder,
        attention: PagedAttention,
        *,
        max_rows: int,
        context: int,
        recorder: Callable[[], Recorder],
        states: bool = False,
    ) -> None:
        self._states = states
        self._model, self._attention, self._new_recorder = model, attention, recorder
        self._rows = padded_rows(max_rows)
        self._ids, self._positions = (
            torch.zeros(self._rows, dtype=torch.int64, device=model.device) for _ in range(2)
        )
        self._places: tuple[DecoderWeights, torch.Tensor] | None
        self._replays: dict[int, Callable[[], None]] = {}
        self.clear()
        model.reserve(context)

    def clear(self) -> None:
        """Drop all graphs, and free their memory."""
        self._replays.clear()
        self._places = None
        model, shape = self._model, self._model.shape
        self._logits = torch.empty(0, shape.vocab, device=model.device)
        self.hidden = torch.empty(0, shape.hidden, device=model.device, dtype=model.dtype)
        """The last hidden states of the rows of the last step, if they are wanted."""

    def compute(self, rows: Sequence[Entry]) -> torch.Tensor:
        """Return the logits of each row's next token, [rows, vocab] in fp32, valid
        until the next step. The number of rows is one of `padded_rows`.

        Raises RuntimeError if the step cannot be recorded, or a recording computes
        anything else than the step.
        """
        count, places = len(rows), (self._model.weights, self._attention.pool.data)
        if self._places is None or any(
            was is not now for was, now in zip(self._places, places, strict=True)
        ):
            self.clear()
            self._places, self._recorder = places, self._new_recorder()
            self._logits = self._logits.new_empty(self._rows, self._model.shape.vocab)
            if self._states:
                self.hidden = self.hidden.new_empty(self._rows, self._model.shape.hidden)
        positions = [entry.computed for entry in rows]
        ids = [entry.tokens[entry.computed] for entry in rows]
        self._ids[:count].copy_(torch.tensor(ids))
        self._positions[:count].copy_(torch.tensor(positions))
        chunks = [Chunk(entry, entry.computed, 1, row) for row, entry in enumerate(rows)]
        plan = self._attention.plan(chunks, rows=count)
        replay = self._replays.get(count)
        if replay is None:
            batch = Batch(
                ids=self._ids[:count], positions=self._positions[:count], longest=0, sampled=None
            )

            def step() -> None:
                hidden = self._model.forward(batch, self._attention, plan)
                self._logits[:count].copy_(self._model.logits(hidden))
                if self._states:
                    self.hidden[:count].copy_(hidden)

            replay = self._replays[count] = self._recorder(step)
            step()
            expected = self._logits[:count].clone()
            self._logits[:count].zero_()
            replay()
            tolerance = CHECK_TOLERANCE[self._model.dtype]
            if not torch.allclose(
                self._logits[:count], expected, rtol=tolerance, atol=tolerance, equal_nan=True
            ):
                raise RuntimeError(f"a recorded step of {count} rows computes other logits")
        else:
            replay()
        return self._logits[:count]
