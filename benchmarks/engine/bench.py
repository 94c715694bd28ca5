"""Bench `engine`: our engine against transformers' batched `generate` and vLLM's
server, interleaved, on random models.

All sample at temperature 1 from the same prompts, produce the same number of tokens and
compute with one thread; the peers are spared the log-probs that our engine gives with
every token. Against transformers it runs in this process, as transformers does; against
vLLM in a child process, as vLLM does. Figures carry the model's name as suffix
(`_tiny`, `_100m`).
"""

import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers.utils import logging as transformers_logging

from benchmarks.contract import Figure, Result
from benchmarks.engine.harness import Harness, ProcessHarness
from benchmarks.engine.models import (
    ModelCase,
    kv_bytes,
    model_cases,
    prompt,
    random_model,
    requests_of,
)
from benchmarks.engine.vllm_server import MISSING, PeerError, VllmServer, conditions_of, interpreter
from rollweave.engine.planner.batching import StepWork
from rollweave.schema.base import EngineId
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

CONCURRENCY = (1, 16, 64)
COMPARED = 16
"""Numbers of concurrent requests at which the peers are measured too."""

THREADS = 1
"""Threads of each engine, as in the processes of a run."""

KV_TOKENS = 32768
"""KV tokens of each engine: more than 64 requests need."""

TURNS, TURNS_QUICK = 10_000, 300
"""Short turns of the first model that run in two batch sizes."""

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

SPARED = "one thread and float32 everywhere; the peers are spared log-probs"
PEERS = {
    "ratio_to_hf_16": f"both in the process of the bench, {SPARED}",
    "ratio_to_vllm_16": (
        f"tokens_per_s_process_16 over tokens_per_s_vllm_16: each in a child process, {SPARED}; "
        "vLLM's time includes HTTP, ours the frames on its socket"
    ),
}


@dataclass(kw_only=True)
class Case:
    """One model under test. `vllm` is None where `missing` says why."""

    subject: ModelCase
    model: Any
    spec: EngineSpec
    scratch: Path
    vllm: VllmServer | None = None
    missing: str = ""


def bench_engine(*, quick: bool) -> Result:
    """Return tokens/s, ratios to peers, cache hits, log-prob error, and whether a batch
    changes the results of its requests.
    """
    torch.set_num_threads(THREADS)
    transformers_logging.disable_progress_bar()
    return compare(
        model_cases(quick=quick),
        turns=TURNS_QUICK if quick else TURNS,
        python=interpreter(),
        eager=quick,
    )


def compare(chosen: Sequence[ModelCase], *, turns: int, python: str | None, eager: bool) -> Result:
    """Return all figures of `chosen`, and of `turns` turns of the first model in two
    batch sizes. vLLM is that of the interpreter `python`, compiled unless `eager`.

    vLLM's servers start during the checks that need no clock. Raises EngineError where
    our engine fails.
    """
    figures: dict[str, Figure] = {}
    conditions: dict[str, Any] = {
        "threads": THREADS,
        "dtype": "float32",
        "sampling": "temperature 1",
        **PEERS,
    }
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollweave-bench-")))
        cases = [
            _case(subject, scratch / subject.name, python, stack, eager=eager) for subject in chosen
        ]
        for case in cases:
            figures |= _named(case.subject, _checked(case))
        changed, maximum = batch_changes(cases[0].spec, cases[0].subject, turns)
        figures |= _named(
            cases[0].subject, {"batch_mismatches": changed, "batch_logprob_change_max": maximum}
        )
        for case in cases:
            _await_vllm(case, conditions)
        for case in cases:
            figures |= _named(case.subject, _speed(case))
            if case.missing:
                conditions |= _named(
                    case.subject,
                    dict.fromkeys(("ratio_to_vllm_16", "tokens_per_s_vllm_16"), case.missing),
                )
    for subject in chosen:
        lengths = {
            "prompt_tokens": subject.prompt,
            "output_tokens": subject.output,
            "repeats": subject.repeats,
        }
        conditions[subject.name] = subject.config | lengths
    batches = f"a batch of {WIDE} and one of {NARROW} that lacks KV"
    conditions[f"batch_mismatches_{chosen[0].name}"] = (
        f"of {turns} turns, half of them greedy, in {batches}"
    )
    return Result(bench="engine", figures=figures, conditions=conditions)


def _named(subject: ModelCase, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}_{subject.name}": value for name, value in values.items()}


def _case(
    subject: ModelCase, scratch: Path, python: str | None, stack: ExitStack, *, eager: bool
) -> Case:
    """Save the model, and start its server."""
    model = random_model(subject)
    model.save_pretrained(scratch)
    spec = EngineSpec(
        id=EngineId("bench"), model=str(scratch), threads=THREADS, kv_tokens=KV_TOKENS
    )
    case = Case(subject=subject, model=model, spec=spec, scratch=scratch)
    if python is None:
        case.missing = MISSING
        return case
    kv = kv_bytes(subject, KV_TOKENS)
    server = VllmServer(
        python, str(scratch), kv_bytes=kv, eager=eager, scratch=scratch, concurrency=COMPARED
    )
    try:
        case.vllm = stack.enter_context(server)
    except PeerError as error:
        case.missing = str(error)
    return case


def _await_vllm(case: Case, conditions: dict[str, Any]) -> None:
    if case.vllm is not None:
        try:
            conditions["vllm"] = conditions_of(case.vllm.wait_ready(), eager=case.vllm.eager)
        except PeerError as error:
            case.vllm, case.missing = None, str(error)


def _checked(case: Case) -> dict[str, Figure]:
    """Return the figures that need no clock: cache hits and log-prob error."""
    with Harness(case.spec) as engine:
        hits = _conversation(engine, case.subject)
    return {"prefix_hit_rate": hits, "logprob_error_max": _worst_logprob(case)}


def _speed(case: Case) -> dict[str, Figure]:
    """Return output tokens per second, prefill included: medians of the repeats, as are
    the ratios of each repeat's rates.
    """
    rates: dict[str, list[float]] = {}
    seeds = itertools.count(1)
    with (
        Harness(case.spec) as engine,
        ProcessHarness(case.spec, log=case.scratch / "engine.log") as process,
    ):
        _round(case, (COMPARED,), engine, process, seeds)  # warm-up
        for _ in range(case.subject.repeats):
            for name, rate in _round(case, CONCURRENCY, engine, process, seeds).items():
                rates.setdefault(name, []).append(rate)
    if case.vllm is None:
        rates.pop(f"vllm_{COMPARED}", None)
    figures: dict[str, Figure] = {
        f"tokens_per_s_{name}": statistics.median(samples) for name, samples in rates.items()
    }
    figures.setdefault(f"tokens_per_s_vllm_{COMPARED}", None)
    for peer, ours in (("hf", f"{COMPARED}"), ("vllm", f"process_{COMPARED}")):
        theirs = rates.get(f"{peer}_{COMPARED}")
        ratios = [a / b for a, b in zip(rates[ours], theirs, strict=True)] if theirs else []
        figures[f"ratio_to_{peer}_{COMPARED}"] = statistics.median(ratios) if ratios else None
    return figures


def _round(
    case: Case,
    counts: Sequence[int],
    engine: Harness,
    process: ProcessHarness,
    seeds: Iterator[int],
) -> dict[str, float]:
    """Return one rate for each contender.

    A vLLM that fails is left out from then on, with the reason.
    """
    rates: dict[str, float] = {}
    for count in counts:
        requests = requests_of(case.subject, count, next(seeds))
        rates[f"{count}"] = _rate(engine.generate, requests)
        if count != COMPARED:
            continue
        rates[f"hf_{count}"] = _transformers_rate(case.model, requests, case.subject.output)
        rates[f"process_{count}"] = _rate(process.generate, requests)
        if case.vllm is not None:
            try:
                rates[f"vllm_{count}"] = _rate(case.vllm.generate, requests)
            except PeerError as error:
                case.vllm, case.missing = None, str(error)
    return rates


def _rate(
    generate: Callable[[list[GenerateRequest]], object], requests: list[GenerateRequest]
) -> float:
    started = time.perf_counter()
    generate(requests)
    return sum(request.sampling.max_tokens for request in requests) / (
        time.perf_counter() - started
    )


@torch.inference_mode()
def _transformers_rate(model: Any, requests: Sequence[GenerateRequest], output: int) -> float:
    longest = max(len(request.tokens) for request in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, longest - len(request.tokens) :] = torch.tensor(request.tokens)
        mask[row, longest - len(request.tokens) :] = 1
    started = time.perf_counter()
    made = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        min_new_tokens=output,
        max_new_tokens=output,
    )
    elapsed = time.perf_counter() - started
    assert made.shape[1] == longest + output
    return len(requests) * output / elapsed


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
            requests = requests_of(short, min(TURNS_AT_ONCE, turns - start), TURNS + start)
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


def _worst_logprob(case: Case) -> float:
    """Return the maximum log-prob error against full forward passes, in a batch that is
    preempted, aborted, suspended and updated.
    """
    model, subject, spec = case.model, case.subject, case.spec
    updated = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in updated.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    requests = requests_of(subject, COMPARED, 999)
    # Half the slots, and KV for about half of those: low ranks lose their slots to high
    # ones, and then their blocks.
    tokens = (
        sum(len(request.tokens) + subject.output for request in requests)
        // 4
        // spec.block_tokens
        * spec.block_tokens
    )
    tight = msgspec.structs.replace(spec, max_slots=COMPARED // 2, kv_tokens=tokens)
    decoded = 0

    def interfere(amounts: StepWork, seconds: float) -> None:
        """Interfere between two steps, on the engine's own thread, so that it happens
        during the work however busy the machine is.
        """
        nonlocal decoded
        before, decoded = decoded, decoded + amounts.decode
        if before < COMPARED <= decoded:
            engine.post(
                *(Rerank(id=request.id, rank=float(i)) for i, request in enumerate(requests))
            )
        if before < 2 * COMPARED <= decoded:
            engine.post(Abort(id=requests[0].id), Suspend())

    with Harness(tight, watch=interfere) as engine, closing(Publisher(case.scratch)) as publisher:
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
