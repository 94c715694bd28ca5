"""Measures steps of an engine before it serves: `step_times` are those of its decode
steps, by batch size (`EngineSpec.profile`), and `capped_slots` is the limit of
sequences that follows from them (`EngineSpec.slots_context`).

A measured step is complete: planned, computed and sampled, over contexts that are
declared computed, since the content of the pool does not change the time. Afterwards
the pool and the mirror are as they were built. All sequences of a step have
contexts of one length, and the measurement leaves out prompts that are prefilled in
the same step.
"""

import statistics
import time

from rollweave.core.policy.admission import SATURATED, Curve, fewest_slots
from rollweave.engine.batching import Batcher, Entry
from rollweave.engine.blocks import BlockLedger
from rollweave.engine.runner import Runner
from rollweave.engine.sampler import RowParams, pack, sample
from rollweave.schema.events import StepTime
from rollweave.schema.serving import EngineSpec, Sampling

CONTEXT_TOKENS = 256
"""Number of tokens in each sequence: some turns of an agent.

It is lower if the engine cannot hold that many in every slot.
"""
WARM_STEPS = 2
"""Number of steps before the measured ones: they place rows in the mirror, and touch
memory for the first time.
"""
STEPS = 5
"""Number of measured steps; their median is the result."""


def capped_slots(spec: EngineSpec, runner: Runner) -> int:
    """Return the number of sequences that the engine should decode at once: all that
    `spec` allows, or with `spec.slots_context` the fewest with nearly the highest
    throughput (ROSE App. A). Between measured numbers, seconds are interpolated.
    """
    context = min(spec.slots_context, runner.pool.tokens // 2)
    if not context or spec.released:
        return spec.max_slots
    times = step_times(spec, runner, context=context)
    if not times:
        return spec.max_slots
    curve = Curve(tuple((step.batch, step.seconds) for step in times))
    return fewest_slots(curve.seconds, most=times[-1].batch)


def step_times(spec: EngineSpec, runner: Runner, *, context: int = 0) -> tuple[StepTime, ...]:
    """Measure the seconds of a decode step for 1, 2, 4, … sequences, up to the number
    that the engine has slots and blocks for. With `context`, each sequence has so many
    tokens; only as many sequences are measured as the engine can hold, and no more once
    these decode hardly more tokens in a second than half of them (`SATURATED`).

    Return nothing for an engine that has no room for the few tokens sampled here.
    """
    pool, steps, until_saturated = runner.pool, WARM_STEPS + STEPS, context > 0
    # Each sequence needs blocks for its context, at least one token, and for the tokens
    # that follow, and one spare block.
    min_blocks = (min(context, max(0, runner.shape.context - steps)) + steps) // (
        pool.block_tokens
    ) + 2
    largest = min(spec.max_slots, pool.blocks // min_blocks)
    if not largest or runner.shape.context <= steps:
        return ()
    context = min(
        context or CONTEXT_TOKENS,
        runner.shape.context - steps,
        (pool.blocks // largest - 1) * pool.block_tokens - steps,
    )
    batches = [1 << power for power in range(largest.bit_length()) if 1 << power < largest] + [
        largest
    ]
    profile: list[StepTime] = []
    for batch in batches:
        seconds, former = _step_s(runner, batch, context), profile[-1:]
        profile.append(StepTime(batch=batch, context=context, seconds=seconds))
        gained = not former or batch / seconds > former[0].batch / former[0].seconds / SATURATED
        if until_saturated and not gained:
            break
    if runner.mirror is not None:
        runner.mirror.forget(memory=True)
    return tuple(profile)


def _step_s(runner: Runner, batch: int, context: int) -> float:
    """Measure the median step of `batch` sequences that start with `context` tokens
    each.
    """
    pool, steps = runner.pool, WARM_STEPS + STEPS
    ledger = BlockLedger(blocks=pool.blocks, block_tokens=pool.block_tokens, caching=False)
    batcher = Batcher(ledger, slots=batch, chunk_tokens=batch * context)
    for number in range(batch):
        batcher.add(Entry(id=str(number), tokens=[0] * context, limit=context + steps))
    for entry, _ in batcher.plan().prefill:
        batcher.advance(entry, context - 1)
    params = pack([Sampling()] * batch, vocab=runner.shape.vocab, device=runner.model.device)
    seconds = [measured_step(runner, batcher, params) for _ in range(steps)]
    forget_all(runner, batcher)
    return statistics.median(seconds[WARM_STEPS:])


def measured_step(runner: Runner, batcher: Batcher, params: RowParams | None = None) -> float:
    """Plan, compute and sample a step, and return its seconds. With `params`, the
    sampling parameters need not be packed.
    """
    started = time.perf_counter()
    plan = batcher.plan()
    entries, logits, _ = runner.compute(plan)
    if params is None:
        rows = [Sampling()] * len(entries)
        params = pack(rows, vocab=runner.shape.vocab, device=runner.model.device)
    tokens, _, _ = sample(logits, [len(entry.tokens) for entry in entries], params)
    for entry, count in [*((entry, 1) for entry in plan.decode), *plan.prefill]:
        batcher.advance(entry, count)
    for entry, token in zip(entries, tokens, strict=True):
        entry.tokens.append(token)
    return time.perf_counter() - started


def forget_all(runner: Runner, batcher: Batcher) -> None:
    """Leave nothing of the sequences that were measured."""
    for entry in batcher.running:
        runner.drop(entry)
        runner.pool.erase(entry.blocks)
