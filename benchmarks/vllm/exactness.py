"""Updates of a vLLM server with requests in flight: every sampled token is scored again
by transformers, under the weights that its span names.
"""

import asyncio
import itertools
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.soak.run_under_test import source_path
from benchmarks.vllm.phases import read_updates
from rollweave.engine.clients.client import EngineClient, in_process
from rollweave.engine.servers.reports import PHASES
from rollweave.io.child import child_of
from rollweave.schema.base import EngineId
from rollweave.schema.serving import (
    EngineSpec,
    GenerateRequest,
    GenerateResult,
    Sampling,
    ServerSpec,
    VersionSpan,
)
from rollweave.weights.checkpoint import read_tensors_of
from rollweave.weights.publication import publish

ENGINE = "rollweave.runtime.entrypoints.server_engine"
"""The module of an engine's process."""

START_S, REPLY_S = 400.0, 120.0
"""Maximum seconds until a server is ready, and for each call, on a busy machine."""

REQUESTS, TOKENS = 16, 300
"""Requests in flight during an update, and their tokens."""

PROMPT = 8
"""Tokens of a prompt."""

SAMPLED_S = 0.3
"""Seconds in which a server samples some tokens before its update."""

CHANGE = 0.05
"""Standard deviation of the change of each weight from one version to the next, which
is far more than that of a training step.
"""

TIE = 1e-4
"""Maximum difference of the log-probs of two tokens either of which may be the most
likely one in float32.
"""


@dataclass(slots=True)
class Exactness:
    """The result of a comparison. `seconds` are those of each update by phase."""

    tokens: int = 0
    continued: int = 0
    """Requests with tokens of two versions."""
    mismatches: int = 0
    span_errors: int = 0
    gap: float = 0.0
    seconds: list[dict[str, float]] = field(default_factory=list)


def measure_updates(python: str, model: Path, scratch: Path, *, updates: int) -> Exactness:
    """Start one engine of `model`, update it, and compare. Raises RollweaveError if the
    engine fails.
    """
    return asyncio.run(_measured(python, model, scratch, updates))


async def _measured(python: str, model: Path, scratch: Path, updates: int) -> Exactness:
    checkpoints = [model, *(_changed(model, scratch, version) for version in range(1, updates + 1))]
    disable_progress_bar()
    figures, log = Exactness(), scratch / "exactness.log"
    engine = _start(python, model, log)
    try:
        await engine.ready()
        for version in range(1, updates + 1):
            requests = list(_requests(version))
            results = await _update(engine, checkpoints[version], version, requests, scratch)
            _compare(requests, results, checkpoints, version, figures)
        figures.seconds = read_updates(log)
    finally:
        await engine.close()
    return figures


def _start(python: str, model: Path, log: Path) -> EngineClient:
    present: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    present.set_result(None)
    spec = EngineSpec(
        id=EngineId("e0"),
        model=str(model),
        max_slots=REQUESTS,
        server=ServerSpec(kind="vllm", python=python, start_s=START_S, control_s=REPLY_S),
    )
    env = {"PYTHONPATH": source_path(), "OMP_NUM_THREADS": "1"}
    link = in_process(spec, spawn=child_of(ENGINE, env=env), log=log, model_ready=present)
    return EngineClient("engine e0", link, start_s=START_S, reply_s=REPLY_S)


def _changed(model: Path, scratch: Path, version: int) -> Path:
    """Write the checkpoint of a version, whose weights nothing was trained for."""
    path = scratch / f"v{version}"
    shutil.copytree(model, path, ignore=shutil.ignore_patterns("*.safetensors"))
    random = torch.Generator().manual_seed(version)
    tensors = {
        name: tensor + CHANGE * torch.randn(tensor.shape, generator=random)
        for name, tensor in read_tensors_of(model)
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _requests(version: int) -> Iterator[GenerateRequest]:
    random = torch.Generator().manual_seed(version)
    for number in range(REQUESTS):
        yield GenerateRequest(
            id=f"v{version}-{number}",
            tokens=tuple(torch.randint(4, 90, (PROMPT,), generator=random).tolist()),
            sampling=Sampling(temperature=0.0, max_tokens=TOKENS),
        )


async def _update(
    engine: EngineClient,
    checkpoint: Path,
    version: int,
    requests: Sequence[GenerateRequest],
    scratch: Path,
) -> list[GenerateResult]:
    """Give the engine a version while it answers these requests."""
    with publish(
        dict(read_tensors_of(checkpoint)),
        version=version,
        publication_id=version,
        directory=scratch,
    ) as publication:
        answers = [engine.generate(request) for request in requests]
        await engine.stage(publication.manifest)
        await asyncio.sleep(SAMPLED_S)
        await engine.suspend()
        await engine.load(publication.manifest)
        engine.resume()
        return await asyncio.gather(*answers)


def _compare(
    requests: Sequence[GenerateRequest],
    results: Sequence[GenerateResult],
    checkpoints: Sequence[Path],
    version: int,
    figures: Exactness,
) -> None:
    allowed = (version - 1, version)
    models = {
        number: AutoModelForCausalLM.from_pretrained(checkpoints[number], dtype=torch.float32)
        for number in allowed
    }
    for request, result in zip(requests, results, strict=True):
        figures.tokens += len(result.tokens)
        figures.continued += len(result.versions) == len(allowed)
        errors = span_errors(result.versions, len(result.tokens), allowed)
        figures.span_errors += errors
        for span in result.versions if not errors else ():
            rows = _rows(models[span.version], request.tokens, result.tokens, span)
            part = slice(span.start, span.end)
            mismatches, gap = compare(rows, result.tokens[part], result.logprobs[part])
            figures.mismatches += mismatches
            figures.gap = max(figures.gap, gap)


def _rows(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], span: VersionSpan
) -> torch.Tensor:
    """Return the log-probs from which the tokens of a span are sampled, [tokens, V]."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens[: span.end]]])).logits[0]
    rows: torch.Tensor = logits[len(prompt) + span.start - 1 : -1].log_softmax(-1)
    return rows


def compare(
    rows: torch.Tensor, tokens: Sequence[int], logprobs: Sequence[float]
) -> tuple[int, float]:
    """Return how many of the greedily sampled `tokens` are not the most likely ones of
    their `rows`, and the largest difference of their log-probs.
    """
    chosen = rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    mismatches = int((rows.max(-1).values - chosen > TIE).sum())
    return mismatches, float((chosen - torch.tensor(logprobs)).abs().max())


def span_errors(spans: Sequence[VersionSpan], count: int, allowed: Sequence[int]) -> int:
    """Return 0 if the spans cover `count` tokens, one after the other, with versions of
    `allowed` in this order; else the number of violations.
    """
    ends = [0, *(span.end for span in spans)]
    gaps = sum(span.start != end for span, end in zip(spans, ends, strict=False))
    order = [allowed.index(span.version) for span in spans if span.version in allowed]
    unknown = len(spans) - len(order)
    backwards = sum(later <= earlier for earlier, later in itertools.pairwise(order))
    return gaps + unknown + backwards + (ends[-1] != count)


def median_seconds(updates: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Return the median of each phase over these updates."""
    return {
        f"update_s_{phase}": round(statistics.median(update[phase] for update in updates), 5)
        if updates
        else None
        for phase in PHASES
    }
