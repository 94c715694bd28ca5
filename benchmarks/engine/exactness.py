"""Checks of the embedded engine that need no clock: log-probs against full forward
passes, results in batches of two sizes, and hits of the prefix cache.
"""

import copy
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.contract import Figure
from benchmarks.engine.harness import Harness
from benchmarks.engine.models import ModelCase, prompt, requests_of
from rollweave.engine.batching import StepWork
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import (
    Abort,
    Add,
    EngineSpec,
    GenerateRequest,
    GenerateResult,
    Load,
    Rerank,
    Resume,
    Sampling,
    Suspend,
    Suspended,
)
from rollweave.weights.publication import Publisher

REQUESTS = 16
"""Requests of a batch whose log-probs are checked."""

WIDE, NARROW = 64, 7
"""Their batch sizes."""

NARROW_KV_TOKENS, NARROW_BLOCK_TOKENS = 160, 4
"""KV and block size of the narrow batch: enough for about half of its requests, which
grow by several blocks each, so that running ones are evicted.
"""

TURN_PROMPT, TURN_OUTPUT = 32, 12
"""Tokens of prompt (on average) and output of a short turn."""

TURNS_AT_ONCE = 500
"""Turns that an engine receives together: many times a batch."""


def checked(model: Any, subject: ModelCase, spec: EngineSpec, scratch: Path) -> dict[str, Figure]:
    """Return the share of prompts that come from the cache, and the log-prob error."""
    with Harness(spec) as engine:
        hits = _conversation(engine, subject)
    return {
        "prefix_hit_rate": hits,
        "logprob_error_max": worst_logprob(model, subject, spec, scratch),
    }


def _conversation(engine: Harness, subject: ModelCase) -> float:
    """Return the share of the prompt tokens of a 20-turn conversation that come from
    the prefix cache.
    """
    context = prompt(subject, 7, length=subject.prompt)
    prompt_tokens = cached = 0
    for turn in range(20):
        sampling = Sampling(max_tokens=min(24, subject.output), seed=turn)
        request = GenerateRequest(id=f"turn{turn}", tokens=context, sampling=sampling)
        (result,) = engine.generate([request])
        prompt_tokens += len(context)
        cached += result.cached_tokens
        context = (*context, *result.tokens, *prompt(subject, 100 + turn, length=16))
    return cached / prompt_tokens


def batch_changes(spec: EngineSpec, subject: ModelCase, turns: int) -> tuple[int, float]:
    """Run short turns, every other one greedy, in a wide batch and in a narrow one that
    lacks KV.

    Returns how many differ in a token, and the maximum difference of a log-prob in the
    others. Raises EngineError where no turn was recomputed.
    """
    short = replace(subject, prompt=TURN_PROMPT, output=TURN_OUTPUT)
    tight = msgspec.structs.replace(
        spec, max_slots=NARROW, kv_tokens=NARROW_KV_TOKENS, block_tokens=NARROW_BLOCK_TOKENS
    )
    differ, maximum = 0, 0.0
    with Harness(msgspec.structs.replace(spec, max_slots=WIDE)) as wide, Harness(tight) as narrow:
        for start in range(0, turns, TURNS_AT_ONCE):
            requests = requests_of(short, min(TURNS_AT_ONCE, turns - start), start + 1)
            for at in range(0, len(requests), 2):
                greedy = msgspec.structs.replace(requests[at].sampling, temperature=0.0)
                requests[at] = msgspec.structs.replace(requests[at], sampling=greedy)
            changed = changes(wide.generate(requests), narrow.generate(requests))
            differ, maximum = differ + changed[0], max(maximum, changed[1])
        recomputed = narrow.stats().recomputed_tokens
    if not recomputed:
        raise EngineError("the narrow batch must lack KV and recompute, but it did not")
    return differ, maximum


def changes(
    wide_results: Sequence[GenerateResult], narrow_results: Sequence[GenerateResult]
) -> tuple[int, float]:
    """Return how many results differ in a token, and the maximum difference of a
    log-prob among the others.
    """
    same = [
        (one, other)
        for one, other in zip(wide_results, narrow_results, strict=True)
        if one.tokens == other.tokens
    ]
    gaps = (
        abs(a - b) for one, other in same for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )
    return len(wide_results) - len(same), max(gaps, default=0.0)


def worst_logprob(model: Any, subject: ModelCase, spec: EngineSpec, scratch: Path) -> float:
    """Return the maximum log-prob error against full forward passes, in a batch that is
    preempted, aborted, suspended and updated.
    """
    updated = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in updated.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    requests = requests_of(subject, REQUESTS, 999)
    # Half the slots, and KV for about half of those: low ranks lose their slots to high
    # ones, and then their blocks.
    tokens = (
        sum(len(request.tokens) + subject.output for request in requests)
        // 4
        // spec.block_tokens
        * spec.block_tokens
    )
    tight = msgspec.structs.replace(spec, max_slots=REQUESTS // 2, kv_tokens=tokens)
    decoded = 0

    def interfere(amounts: StepWork, seconds: float) -> None:
        """Interfere between two steps, on the engine's own thread, so that it happens
        during the work however busy the machine is.
        """
        nonlocal decoded
        before, decoded = decoded, decoded + amounts.decode
        if before < REQUESTS <= decoded:
            engine.post(
                *(Rerank(id=request.id, rank=float(i)) for i, request in enumerate(requests))
            )
        if before < 2 * REQUESTS <= decoded:
            engine.post(Abort(id=requests[0].id), Suspend())

    with Harness(tight, watch=interfere) as engine, closing(Publisher()) as publisher:
        engine.post(Suspend(), *(Add(request=request) for request in requests), Resume())
        engine.expect(Suspended)  # the one before they came
        engine.expect(Suspended)
        engine.post(
            Load(manifest=publisher.publish(updated.state_dict(), version=1, publication_id=1)),
            Resume(),
        )
        results = engine.results(requests)
        stats = engine.stats()
    if not (
        stats.preemptions
        and stats.recomputed_tokens
        and any(len(result.versions) > 1 for result in results)
    ):
        raise EngineError(f"the run must preempt, recompute and update in flight, got {stats}")
    models = {-1: model, 1: updated}
    return max(
        _logprob_error(models, request, result)
        for request, result in zip(requests, results, strict=True)
    )


@torch.inference_mode()
def _logprob_error(
    models: dict[int, Any], request: GenerateRequest, result: GenerateResult
) -> float:
    ids = torch.tensor([[*request.tokens, *result.tokens]])
    worst = 0.0
    for span in result.versions:
        rows = torch.log_softmax(models[span.version](ids).logits[0].float(), dim=-1)
        for at in range(span.start, span.end):
            expected = rows[len(request.tokens) + at - 1, result.tokens[at]].item()
            worst = max(worst, abs(expected - result.logprobs[at]))
    return worst
