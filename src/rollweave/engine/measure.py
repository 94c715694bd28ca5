"""How long a decode step of this engine takes, by batch: measured before it serves
(`EngineSpec.profile`).

What is measured is a whole step, planned, computed and sampled, over contexts that are
taken for computed: what stands in the pool does not change the time. Afterwards pool
and mirror are as they were built. Requests of a later life differ in what this leaves
out: contexts longer or shorter than `CONTEXT_TOKENS`, and prompts that are prefilled
beside them.
"""

import statistics
import time

from rollweave.engine.planner.batching import Batcher, Entry
from rollweave.engine.planner.blocks import BlockLedger
from rollweave.engine.runner import Runner
from rollweave.engine.sampler import pack, sample
from rollweave.schema.events import StepTime
from rollweave.schema.serving import EngineSpec, Sampling

CONTEXT_TOKENS = 256
"""Tokens that each sequence has: some turns of an agent.

Fewer where the engine has no room for as many in every slot.
"""
WARM_STEPS = 2
"""Steps before those that count: they place rows in the mirror, and touch memory for
the first time.
"""
STEPS = 5
"""Steps whose median counts."""


def step_times(spec: EngineSpec, runner: Runner) -> tuple[StepTime, ...]:
    """Seconds of a decode step for 1, 2, 4, … sequences, and for as many as the engine
    has slots and blocks for.

    Nothing for an engine that has no room for the few tokens that are sampled here.
    """
    pool, steps = runner.pool, WARM_STEPS + STEPS
    # blocks of a sequence: for one token and those that follow, and one to spare
    fewest = steps // pool.block_tokens + 2
    most = min(spec.max_slots, pool.blocks // fewest)
    if not most or runner.shape.context <= steps:
        return ()
    context = min(
        CONTEXT_TOKENS,
        runner.shape.context - steps,
        (pool.blocks // most - 1) * pool.block_tokens - steps,
    )
    batches = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    found = tuple(
        StepTime(batch=batch, context=context, seconds=_step_s(runner, batch, context))
        for batch in batches
    )
    if runner.mirror is not None:
        runner.mirror.forget(memory=True)
    return found


def _step_s(runner: Runner, batch: int, context: int) -> float:
    """The median step of `batch` sequences, which have `context` tokens at the first."""
    pool, steps = runner.pool, WARM_STEPS + STEPS
    ledger = BlockLedger(blocks=pool.blocks, block_tokens=pool.block_tokens, caching=False)
    batcher = Batcher(ledger, slots=batch, chunk_tokens=batch * context)
    for number in range(batch):
        batcher.add(Entry(id=str(number), tokens=[0] * context, limit=context + steps))
    for entry, _ in batcher.plan().prefill:
        batcher.advance(entry, context - 1)
    params = pack([Sampling()] * batch, vocab=runner.shape.vocab, device=runner.model.device)
    seconds: list[float] = []
    for _ in range(steps):
        started = time.perf_counter()
        plan = batcher.plan()
        entries, logits = runner.compute(plan)
        tokens, _ = sample(logits, [len(entry.tokens) for entry in entries], params)
        for entry, token in zip(entries, tokens, strict=True):
            batcher.advance(entry, 1)
            entry.tokens.append(token)
        seconds.append(time.perf_counter() - started)
    for entry in batcher.running:
        runner.drop(entry)
        pool.erase(entry.blocks)
    return statistics.median(seconds[WARM_STEPS:])
