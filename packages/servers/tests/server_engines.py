"""Weights for engines with an inference server, and checks of what such an engine
serves: its log-probs are compared with those of the embedded engine from the same
weights.
"""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from rollweave.engine.clients.client import EngineClient, in_process
from rollweave.engine.clients.streams import REPORT_TOKENS
from rollweave.engine.embedded import start_engine
from rollweave.io.child import child_of
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import WeightManifest
from rollweave.weights.adapters import A, B, linear_layers
from rollweave.weights.checkpoint import read_shape, read_tensors_of
from rollweave.weights.publication import Publication, publish
from tests.support.engines import environment, vllm_checkpoint
from tests.support.processes import alive

EXACT = 1e-4
TIE = 1e-5
"""Maximum difference of the log-probs of two tokens of which rounding, which depends on
what else is in a batch, chooses one. One token in a hundred has such a rival.
"""
SCALE = 2.0
END = 127
PROMPT = (3, 1, 4, 1, 5)


def greedy(id: str, tokens: tuple[int, ...] = PROMPT, *, count: int = 12) -> s.GenerateRequest:
    return s.GenerateRequest(
        id=id, tokens=tokens, sampling=s.Sampling(temperature=0.0, max_tokens=count)
    )


class Weights:
    """Checkpoints of one shape by their number, and their publications."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._open = directory, list[Publication]()
        self.model = self.checkpoint(0)

    def checkpoint(self, number: int) -> Path:
        path = self._directory / str(number)
        if not path.exists():
            path.mkdir()
            self.write(path, number)
        return path

    def write(self, path: Path, number: int) -> None:
        vllm_checkpoint(path, seed=number, eos_token_id=END)

    def published(self, number: int, *, without: str = "") -> WeightManifest:
        tensors = dict(read_tensors_of(self.checkpoint(number)))
        tensors.pop(without, None)
        self._open.append(publish(tensors, version=number, publication_id=number))
        return self._open[-1].manifest

    def adapters(self, number: int) -> WeightManifest:
        """Publish random adapters of checkpoint 0 which make it checkpoint `number`."""
        generator = torch.Generator().manual_seed(number)
        base, path = dict(read_tensors_of(self.model)), self._directory / str(number)
        adapters = {}
        for layer in linear_layers(read_shape(self.model)):
            out, columns = base[f"{layer}.weight"].shape
            a = torch.randn(4, columns, generator=generator) / columns**0.5
            b = 0.3 * torch.randn(out, 4, generator=generator)
            adapters |= {layer + A: a, layer + B: b}
            base[f"{layer}.weight"] = base[f"{layer}.weight"] + SCALE * b @ a
        shutil.copytree(self.model, path)
        save_file(base, path / "model.safetensors", metadata={"format": "pt"})
        self._open.append(publish(adapters, version=number, publication_id=number))
        return self._open[-1].manifest

    async def continued(self, number: int, request: s.GenerateRequest) -> s.GenerateResult:
        """Return what the embedded engine makes of a request under these weights."""
        engine = start_engine(self.checkpoint(number))
        try:
            await engine.ready()
            return await engine.generate(request)
        finally:
            await engine.close()

    def close(self) -> None:
        for publication in self._open:
            publication.close()


def spec_of(
    weights: Weights,
    server: s.ServerSpec,
    lora_scale: float | None = None,
    *,
    routes: bool = False,
) -> s.EngineSpec:
    return s.EngineSpec(
        id=EngineId("e0"),
        model=str(weights.model),
        max_slots=16,
        kv_tokens=16384,
        server=server,
        lora_scale=lora_scale,
        routes=routes,
    )


@asynccontextmanager
async def started(
    weights: Weights,
    tmp_path: Path,
    server: s.ServerSpec,
    lora_scale: float | None = None,
    *,
    routes: bool = False,
) -> AsyncIterator[tuple[EngineClient, int]]:
    """Start an engine, and yield it with the id of its process."""
    present: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    present.set_result(None)
    link = in_process(
        spec_of(weights, server, lora_scale, routes=routes),
        spawn=child_of("rollweave.runtime.entrypoints.server_engine", env=environment()),
        log=tmp_path / "e0.log",
        model_ready=present,
    )
    engine = EngineClient("engine e0", link, start_s=server.start_s, reply_s=120.0)
    try:
        await engine.ready()
        yield engine, engine._link.pid  # type: ignore[attr-defined]
    finally:
        await engine.close()


async def all_end(pids: list[int]) -> None:
    """Wait until none of these processes is left."""
    async with asyncio.timeout(30):
        while any(map(alive, pids)):  # noqa: ASYNC110 (nothing reports their ends)
            await asyncio.sleep(0.05)


async def agrees(engine: EngineClient, weights: Weights, number: int) -> None:
    """Assert that the engine serves exactly these weights."""
    there = await engine.generate(greedy("probe", count=12))
    assert len(there.tokens) == 12 or there.tokens[-1] == END
    await are_sampled(weights, number, PROMPT, there.tokens, there.logprobs)


async def are_sampled(
    weights: Weights,
    number: int,
    context: tuple[int, ...],
    tokens: tuple[int, ...],
    logprobs: tuple[float, ...],
) -> None:
    """Assert that these weights sample the tokens greedily after a context, with these
    log-probs. After a token that was as likely as the expected one, the comparison
    continues.
    """
    start = 0
    while start < len(tokens):
        request = greedy("reference", (*context, *tokens[:start]), count=len(tokens) - start)
        expected = await weights.continued(number, request)
        pairs = enumerate(zip(tokens[start:], expected.tokens, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), len(expected.tokens))
        end = start + same
        assert logprobs[start:end] == pytest.approx(expected.logprobs[:same], abs=EXACT)
        if end < len(tokens):
            assert same < len(expected.tokens), "it ended, or was cut, too late"
            assert logprobs[end] == pytest.approx(expected.logprobs[same], abs=TIE), (
                f"token {end} is {tokens[end]}, not {expected.tokens[same]}"
            )
        start = end + 1


async def updates_are_exact_and_refused_ones_leave_the_old_weights(
    engine: EngineClient, weights: Weights
) -> None:
    await agrees(engine, weights, 0)
    await engine.load(weights.published(1))  # as an engine that has just joined
    await agrees(engine, weights, 1)

    await requests_in_flight_continue_under_new_weights(engine, weights)
    await agrees(engine, weights, 2)
    assert (await engine.stats()).version == 2

    good = weights.published(3)
    torn = msgspec.structs.replace(good, digest="0" * 32)
    for call in (engine.stage, engine.load):
        with pytest.raises(WeightsError, match="the manifest says 0000"):
            await call(torn)
    with pytest.raises(WeightsError, match=r"missing \['model.norm.weight'\]"):
        await engine.load(weights.published(4, without="model.norm.weight"))
    gone = msgspec.structs.replace(good, location="/proc/1/fd/9999")
    with pytest.raises(WeightsError, match="the publisher is gone"):
        await engine.load(gone)
    await agrees(engine, weights, 2)

    # stale prefixes: the same prompt was computed under three other versions
    await engine.stage(good)
    await engine.load(good)
    await agrees(engine, weights, 3)
    assert (await engine.generate(greedy("again"))).versions[0].version == 3

    await engine.suspend()
    aborted = engine.generate(greedy("r0", count=400))
    await engine.stats()
    engine.abort("r0")
    assert (await aborted).tokens == ()
    engine.resume()
    await agrees(engine, weights, 3)


async def requests_in_flight_continue_under_new_weights(
    engine: EngineClient, weights: Weights
) -> None:
    """The tokens of each version are those that its weights sample after the ones
    before.
    """
    requests = [greedy(f"r{number}", (number, *PROMPT), count=400) for number in range(8)]
    answers = [engine.generate(request) for request in requests]
    manifest = weights.published(2)
    await engine.stage(manifest)
    await tokens_are_sampled(engine)
    suspended = await engine.suspend()
    assert suspended.in_flight == 8
    await engine.load(manifest)
    engine.resume()
    results = await asyncio.gather(*answers)
    for request, result in list(zip(requests, results, strict=True))[:2]:
        assert [span.version for span in result.versions] == [1, 2]
        (before, after) = result.versions
        older, newer = result.tokens[: before.end], result.tokens[after.start :]
        await are_sampled(weights, 1, request.tokens, older, result.logprobs[: before.end])
        context = (*request.tokens, *older)
        await are_sampled(weights, 2, context, newer, result.logprobs[after.start :])


async def streamed_tokens_are_of_the_weights_that_they_name(
    engine: EngineClient, weights: Weights, *, until_the_end: bool
) -> None:
    """Change the weights from version 1 to 2 in the middle of a streamed turn. With
    `until_the_end`, tokens of version 2 are reported before it ends.
    """
    await engine.load(weights.published(1))
    manifest, deltas = weights.published(2), list[s.TokenDelta]()
    both = {1: asyncio.Event(), 2: asyncio.Event()}

    def on_tokens(delta: s.TokenDelta) -> None:
        deltas.append(delta)
        for span in delta.versions:
            both[span.version].set()

    await engine.stage(manifest)
    turn = engine.generate(greedy("streamed", count=400), on_tokens, report_s=0.001)
    await both[1].wait()
    await engine.suspend()
    await engine.load(manifest)
    engine.resume()
    if until_the_end:
        await both[2].wait()
        engine.abort("streamed")
    result = await turn
    assert [span.version for span in result.versions] == [1, 2]
    assert [delta.start for delta in deltas] == list(
        itertools.accumulate((len(delta.tokens) for delta in deltas[:-1]), initial=0)
    )
    count = deltas[-1].start + len(deltas[-1].tokens)
    assert tuple(token for delta in deltas for token in delta.tokens) == result.tokens[:count]
    assert tuple(value for delta in deltas for value in delta.logprobs) == result.logprobs[:count]
    spans = [span for delta in deltas for span in delta.versions]
    assert s.spans_between(spans, 0, count) == s.spans_between(result.versions, 0, count)
    newest = [span.version for delta in deltas[:-1] for span in delta.versions]
    assert until_the_end or 2 not in newest  # the last part names the versions
    (before, after) = result.versions
    older = result.tokens[: before.end]
    await are_sampled(weights, 1, PROMPT, older, result.logprobs[: before.end])
    newer = result.tokens[after.start :]
    await are_sampled(weights, 2, (*PROMPT, *older), newer, result.logprobs[after.start :])

    # a turn that continues is reported from there
    start = min(3, len(older))
    resumed = s.PartialOutput(
        tokens=older[:start],
        logprobs=result.logprobs[:start],
        versions=(s.VersionSpan(start=0, end=start, version=1),),
        generate_s=1.0,
    )
    deltas.clear()
    rest = msgspec.structs.replace(greedy("rest", count=300), resumed=resumed)
    whole = await engine.generate(rest, on_tokens, report_s=0.001)
    assert whole.tokens[:start] == older[:start]
    assert deltas[0].start == start
    end = start + len(deltas[0].tokens)
    assert deltas[0].versions[0] == s.VersionSpan(start=start, end=end, version=2)
    assert deltas[0].generate_s >= 1.0

    # no client reads this turn, which is reported in long parts
    deltas.clear()
    logged = await engine.generate(greedy("logged", count=400), on_tokens, report_s=2 * s.STREAM_S)
    known = tuple(token for delta in deltas for token in delta.tokens)
    assert known == logged.tokens[: len(known)]
    assert len(deltas) <= 1 + len(logged.tokens) / REPORT_TOKENS


async def tokens_are_sampled(engine: EngineClient) -> None:
    """Return once the turns that were sent before have tokens: servers begin turns in
    the order of their arrival, so a turn of two tokens ends after the first of theirs.
    """
    async with asyncio.timeout(60):
        await engine.generate(greedy("last", count=2))


async def adapters_are_added_to_the_first_weights(engine: EngineClient, weights: Weights) -> None:
    await agrees(engine, weights, 0)
    await engine.load(weights.adapters(5))
    await agrees(engine, weights, 5)
    manifest = weights.adapters(6)
    await engine.stage(manifest)
    await engine.load(manifest)
    await agrees(engine, weights, 6)
    whole = weights.published(0)
    with pytest.raises(WeightsError, match="tensors must be those of adapters"):
        await engine.load(whole)
    await agrees(engine, weights, 6)
