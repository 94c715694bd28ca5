"""Bench `engine`: our engine against transformers' batched `generate` and vLLM's
server, interleaved, on random models, or on the model of `--model`.

All sample at temperature 1 from the same prompts, produce the same number of tokens and
compute with one thread; the peers are spared the log-probs that our engine gives with
every token. Against transformers it runs in this process, as transformers does; against
vLLM in a child process, as vLLM does. Figures carry the model's name as suffix
(`_tiny`, `_100m`, `_model`).
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from transformers.utils import logging as transformers_logging

from benchmarks.contract import Figure, Result
from benchmarks.engine.exactness import NARROW, WIDE, batch_changes, checked
from benchmarks.engine.harness import Harness, ProcessHarness
from benchmarks.engine.models import (
    ModelCase,
    kv_bytes,
    model_cases,
    model_of,
    pretrained_case,
    requests_of,
)
from benchmarks.engine.vllm_server import MISSING, PeerError, VllmServer, conditions_of, interpreter
from benchmarks.harness import median_ratio, scratch_folder
from rollweave.io.machine import describe_computation
from rollweave.schema.base import EngineId
from rollweave.schema.serving import EngineSpec, GenerateRequest

CONCURRENCY = (1, 16, 64)
"""Numbers of concurrent requests, beside those at which the peers are measured."""

SHORT = 16  # concurrent requests of the same engine in bfloat16

THREADS = 1
"""Threads of each engine, as in the processes of a run."""

KV_TOKENS = 16384
"""KV tokens of each engine: more than 64 requests need."""

TURNS, TURNS_QUICK = 10_000, 300
"""Short turns of the first model that run in two batch sizes."""

SPARED = "one thread and float32 everywhere; the peers are spared log-probs"
PEERS = {
    "ratio_to_hf": f"both in the process of the bench, {SPARED}",
    "ratio_to_vllm": (
        f"tokens_per_s_process over tokens_per_s_vllm: each in a child process, {SPARED}; "
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


def bench_engine(*, quick: bool, model: Path | None) -> Result:
    """Return tokens/s, ratios to peers, cache hits, log-prob error, and whether a batch
    changes the results of its requests; with a pretrained `model`, of that alone.
    """
    torch.set_num_threads(THREADS)
    transformers_logging.disable_progress_bar()
    return compare(
        model_cases(quick=quick) if model is None else [pretrained_case(model, quick=quick)],
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
        "dtype": f"float32; bf16: {describe_computation('bfloat16', 'cpu')}",
        "sampling": "temperature 1",
        **PEERS,
    }
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder())
        cases = [
            _case(subject, scratch / subject.name, python, stack, eager=eager) for subject in chosen
        ]
        for case in cases:
            figures |= _named(
                case.subject, checked(case.model, case.subject, case.spec, case.scratch)
            )
        changed, maximum = batch_changes(cases[0].spec, cases[0].subject, turns)
        figures |= _named(
            cases[0].subject, {"batch_mismatches": changed, "batch_logprob_change_max": maximum}
        )
        for case in cases:
            _await_vllm(case, conditions)
        for case in cases:
            figures |= _named(case.subject, _speed(case))
            if case.missing:
                names = [
                    f"{what}_vllm_{count}"
                    for what in ("ratio_to", "tokens_per_s")
                    for count in case.subject.compared
                ]
                conditions |= _named(case.subject, dict.fromkeys(names, case.missing))
    for subject in chosen:
        lengths = {
            "prompt_tokens": subject.prompt,
            "output_tokens": subject.output,
            "repeats": subject.repeats,
        }
        conditions[subject.name] = subject.config | lengths | {"path": str(subject.path)}
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
    """Save the model, unless it is a checkpoint, and start its server."""
    model, folder = model_of(subject), str((subject.path or scratch).absolute())
    scratch.mkdir()
    if subject.path is None:
        model.save_pretrained(scratch)
    spec = EngineSpec(id=EngineId("bench"), model=folder, threads=THREADS, kv_tokens=KV_TOKENS)
    case = Case(subject=subject, model=model, spec=spec, scratch=scratch)
    if python is None:
        case.missing = MISSING
        return case
    kv = kv_bytes(subject, KV_TOKENS)
    server = VllmServer(
        python,
        folder,
        kv_bytes=kv,
        eager=eager,
        scratch=scratch,
        concurrency=max(subject.compared),
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


def _speed(case: Case) -> dict[str, Figure]:
    """Return output tokens per second, prefill included: medians of the repeats, as are
    the ratios of each repeat's rates.
    """
    rates: dict[str, list[float]] = {}
    seeds, compared = itertools.count(1), case.subject.compared
    short = replace(case.spec, dtype="bfloat16")
    with (
        Harness(case.spec) as engine,
        Harness(short) as engine_16,
        ProcessHarness(case.spec, log=case.scratch / "engine.log") as process,
    ):
        _round(case, compared[-1:], engine, process, seeds)  # warm-up
        _rate(engine_16.generate, requests_of(case.subject, SHORT, next(seeds)))
        for _ in range(case.subject.repeats):
            counts = sorted({*CONCURRENCY, *compared})
            measured = _round(case, counts, engine, process, seeds)
            short_requests = requests_of(case.subject, SHORT, next(seeds))
            measured["bf16"] = _rate(engine_16.generate, short_requests)
            for name, rate in measured.items():
                rates.setdefault(name, []).append(rate)
    if case.vllm is None:
        rates = {name: samples for name, samples in rates.items() if "vllm" not in name}
    figures: dict[str, Figure] = {
        f"tokens_per_s_{name}": statistics.median(samples) for name, samples in rates.items()
    }
    figures["bf16_over_f32"] = median_ratio(rates["bf16"], rates[f"{SHORT}"])
    for count in compared:
        figures.setdefault(f"tokens_per_s_vllm_{count}", None)
        for peer, ours in (("hf", f"{count}"), ("vllm", f"process_{count}")):
            theirs = rates.get(f"{peer}_{count}")
            figures[f"ratio_to_{peer}_{count}"] = theirs and median_ratio(rates[ours], theirs)
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
        if count not in case.subject.compared:
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
