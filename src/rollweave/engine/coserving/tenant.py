"""The borrower's model of a co-serving engine, and the profile of a model that shares a
device with another one: the seconds of prompts by their tokens, and of decode steps by
their sequences.

All measured steps use the KV blocks of the pool's first group, which always has memory
(`memory.py`). It may be smaller than one prompt, so sequences share its blocks: what
they read there is meaningless, but reading it takes the same time. The other model may
compute between two steps.
"""

import itertools
import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

import msgspec

from rollweave.core.policy.admission import CHUNK_TOKENS, Curve, Profile
from rollweave.engine.batching import Batcher, Entry
from rollweave.engine.blocks import BlockLedger
from rollweave.engine.core import EngineCore
from rollweave.engine.coserving.memory import MappedPool, ModelMemory
from rollweave.engine.measure import forget_all, measured_step
from rollweave.engine.runner import Runner
from rollweave.engine.thread import Mailbox

STEPS = 3
"""Number of measured steps of a size, of which the median counts. One more step before
them does not count.
"""

CONTEXT_TOKENS = 128
"""Number of tokens in each sequence that decodes."""

ProfileSteps = Generator[float, bool, Profile]
"""A measurement in single steps. It yields the seconds that the next step is expected
to take, 0 if unknown, and computes it once True is sent. If False is sent, this size
and all larger ones are left out, and the profile extrapolates to them; but the smallest
size is measured in any case.
"""


def measure_profile(runner: Runner, *, blocks: int, slots: int) -> Profile:
    """Measure a model's steps with the first `blocks` blocks of its pool."""
    steps = profile_steps(runner, blocks=blocks, slots=slots)
    try:
        next(steps)
        while True:
            steps.send(True)
    except StopIteration as end:
        profile: Profile = end.value
        return profile


def profile_steps(runner: Runner, *, blocks: int, slots: int) -> ProfileSteps:
    """Measure as `measure_profile` does, each step when the caller asks for it."""
    longest = runner.shape.context - 1
    sizes = [1 << power for power in range(4, CHUNK_TOKENS.bit_length()) if 1 << power <= longest]
    prefill = yield from measure_curve(
        sizes or [1], lambda size: _prefill_steps(runner, blocks, size)
    )
    context = max(1, min(CONTEXT_TOKENS, longest - STEPS - 2))
    batches = [1 << power for power in range(slots.bit_length())]
    decode = yield from measure_curve(
        batches,
        lambda batch: _decode_steps(runner, blocks, batch, context),
        first_s=prefill.points[0][1],
    )
    if runner.mirror is not None:
        runner.mirror.forget(memory=True)
    # An embedded engine computes every prompt in chunks of the same size.
    return Profile(mono=prefill, chunked=prefill, decode=decode)


class _SharedBlocks(BlockLedger):
    """A ledger that gives the first `memory` blocks to sequences again and again."""

    def __init__(self, *, memory: int, blocks: int, block_tokens: int) -> None:
        super().__init__(blocks=blocks, block_tokens=block_tokens, caching=False)
        self._next = itertools.cycle(range(memory))

    def allocate(self, count: int) -> list[int]:
        return list(itertools.islice(self._next, count))

    def release(self, blocks: Sequence[int]) -> None:
        """Do nothing: the ledger never runs out of blocks."""


def measure_curve(
    sizes: Sequence[int],
    steps_of: Callable[[int], Generator[float, None, None]],
    *,
    first_s: float = 0.0,
) -> Generator[float, bool, Curve]:
    """Measure each size. `steps_of(size)` computes a step whenever it is iterated, and
    yields its seconds; `first_s` are expected for the first one, 0 if unknown.
    """
    points: list[tuple[int, float]] = []
    for size in sizes:
        expected = points[-1][1] * size / points[-1][0] if points else first_s
        seconds: list[float] = []
        with closing(steps_of(size)) as steps:
            for _ in range(1 + STEPS):
                if not (yield expected) and points:
                    return Curve(tuple(points))
                expected = next(steps)
                seconds.append(expected)
        points.append((size, statistics.median(seconds[1:])))
    return Curve(tuple(points))


def _prefill_steps(runner: Runner, blocks: int, tokens: int) -> Generator[float, None, None]:
    while True:
        batcher = _batcher(runner, blocks, slots=1, chunk=tokens)
        batcher.add(Entry(id="0", tokens=[0] * tokens, limit=tokens))
        seconds = measured_step(runner, batcher)
        forget_all(runner, batcher)
        yield seconds


def _decode_steps(
    runner: Runner, blocks: int, batch: int, context: int
) -> Generator[float, None, None]:
    batcher = _batcher(runner, blocks, slots=batch, chunk=batch * context)
    for number in range(batch):
        batcher.add(Entry(id=str(number), tokens=[0] * context, limit=context + STEPS + 1))
    for entry, _ in batcher.plan().prefill:
        batcher.advance(entry, context - 1)
    try:
        while True:
            yield measured_step(runner, batcher)
    finally:
        forget_all(runner, batcher)


def _batcher(runner: Runner, blocks: int, *, slots: int, chunk: int) -> Batcher:
    size = runner.pool.block_tokens
    each = -(-(chunk // slots + STEPS + 2) // size) + 1
    ledger = _SharedBlocks(memory=blocks, blocks=slots * each, block_tokens=size)
    return Batcher(ledger, slots=slots, chunk_tokens=chunk)


class Tenant:
    """The borrower's model: its engine, the commands for it, and its memory."""

    def __init__(self, core: EngineCore, mailbox: Mailbox, pool: MappedPool) -> None:
        self.core, self.mailbox, self.pool = core, mailbox, pool
        self.memory: ModelMemory | None = None
        self.error = ""

    def build(self) -> None:
        """Build the model, on any thread, and reply `Ready`. `error` says
        why that failed.
        """
        try:
            self.core.reply(msgspec.structs.replace(self.core.build(), lent=True))
            planner = self.core.planner
            self.memory = ModelMemory(self.pool, planner.ledger, planner)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def execute(self) -> bool:
        """Execute the commands for the model."""
        return self.mailbox.execute(self.core)


class Measuring:
    """The measurement of a borrower's model, step by step. `expected_s` are the seconds
    of its next step, which has waited since `since`.
    """

    def __init__(self, tenant: Tenant, *, started: float, now: float) -> None:
        self.tenant, self.started, self.since = tenant, started, now
        core, blocks = tenant.core, tenant.pool.group_blocks
        self._steps = profile_steps(core.runner, blocks=blocks, slots=core.spec.max_slots)
        self.expected_s = next(self._steps)

    def step(self, *, fits: bool) -> Profile | None:
        """Compute the next step, or leave its size out if it does not fit. Return the
        profile at the end.
        """
        try:
            self.expected_s = self._steps.send(fits)
        except StopIteration as end:
            profile: Profile = end.value
            return profile
        return None

    def end(self) -> None:
        """Give the measurement up."""
        self._steps.close()
