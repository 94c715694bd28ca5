"""Measures the profile of a model beside another one: the seconds of prompts by their
tokens, and of decode steps by their sequences.

All measured steps use the blocks of the first group, which always has memory.
"""

import statistics
import time

from rollweave.core.policy.admission import CHUNK_TOKENS, Curve, Profile
from rollweave.engine.planner.batching import Batcher, Entry
from rollweave.engine.planner.blocks import BlockLedger
from rollweave.engine.runner import Runner
from rollweave.engine.sampler import pack, sample
from rollweave.schema.serving import Sampling

STEPS = 3
"""Number of measured steps of a size; their median counts. One more goes before."""

CONTEXT_TOKENS = 128
"""Number of tokens in each sequence that decodes."""


def measure_profile(runner: Runner, *, blocks: int, slots: int) -> Profile:
    """Measure a model's steps with the first `blocks` blocks of its pool."""
    room = min(blocks * runner.pool.block_tokens, runner.shape.context - 1)
    sizes = [1 << power for power in range(4, CHUNK_TOKENS.bit_length()) if 1 << power <= room]
    prefill = Curve(tuple((size, _prefill_s(runner, blocks, size)) for size in sizes or [1]))
    each = -(-(CONTEXT_TOKENS + STEPS + 2) // runner.pool.block_tokens)
    context = min(CONTEXT_TOKENS, room - STEPS - 2)
    largest = max(1, min(slots, blocks // (each + 1)))
    batches = [1 << power for power in range(largest.bit_length()) if 1 << power <= largest]
    decode = Curve(tuple((batch, _decode_s(runner, blocks, batch, context)) for batch in batches))
    if runner.mirror is not None:
        runner.mirror.forget(memory=True)
    # An embedded engine computes every prompt in chunks of the same size.
    return Profile(mono=prefill, chunked=prefill, decode=decode)


def _prefill_s(runner: Runner, blocks: int, tokens: int) -> float:
    seconds: list[float] = []
    for _ in range(1 + STEPS):
        batcher = _batcher(runner, blocks, slots=1, chunk=tokens)
        batcher.add(Entry(id="0", tokens=[0] * tokens, limit=tokens))
        seconds.append(_step_s(runner, batcher))
        _forget(runner, batcher)
    return statistics.median(seconds[1:])


def _decode_s(runner: Runner, blocks: int, batch: int, context: int) -> float:
    batcher = _batcher(runner, blocks, slots=batch, chunk=batch * context)
    for number in range(batch):
        batcher.add(Entry(id=str(number), tokens=[0] * context, limit=context + STEPS + 1))
    for entry, _ in batcher.plan().prefill:
        batcher.advance(entry, context - 1)
    seconds = [_step_s(runner, batcher) for _ in range(1 + STEPS)]
    _forget(runner, batcher)
    return statistics.median(seconds[1:])


def _batcher(runner: Runner, blocks: int, *, slots: int, chunk: int) -> Batcher:
    ledger = BlockLedger(blocks=blocks, block_tokens=runner.pool.block_tokens, caching=False)
    return Batcher(ledger, slots=slots, chunk_tokens=chunk)


def _step_s(runner: Runner, batcher: Batcher) -> float:
    started = time.perf_counter()
    plan = batcher.plan()
    entries, logits, _ = runner.compute(plan)
    params = pack(
        [Sampling()] * len(entries),
        vocab=runner.shape.vocab,
        device=runner.model.device,
    )
    tokens, _ = sample(logits, [len(entry.tokens) for entry in entries], params)
    for entry, count in [*((entry, 1) for entry in plan.decode), *plan.prefill]:
        batcher.advance(entry, count)
    for entry, token in zip(entries, tokens, strict=True):
        entry.tokens.append(token)
    return time.perf_counter() - started


def _forget(runner: Runner, batcher: Batcher) -> None:
    for entry in batcher.running:
        runner.drop(entry)
        runner.pool.erase(entry.blocks)
