"""New weights in a real vLLM server, and what goes wrong with them (`make test-vllm`).

Log-probs are compared with those of the embedded engine, or of transformers, from the
same weights.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollweave.engine.clients.client import EngineClient
from rollweave.engine.clients.process import in_process
from rollweave.engine.embedded import start_engine
from rollweave.engine.servers.control import RefusedError
from rollweave.engine.vllm.control import VllmControl
from rollweave.engine.vllm.server import VllmServer
from rollweave.schema.base import EngineId
from rollweave.schema.errors import EngineLostError, WeightsError
from rollweave.schema.serving import (
    EngineSpec,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Sampling,
    ServerSpec,
)
from rollweave.schema.weights import WeightManifest
from rollweave.weights.adapters import A, B, linear_layers
from rollweave.weights.checkpoint import read_shape, read_tensors_of
from rollweave.weights.publication import Publication, publish
from tests.support.engines import VLLM_START_S, environment, needs_vllm, vllm_checkpoint, vllm_spec
from tests.support.processes import alive, descendants

pytestmark = list(needs_vllm)

EXACT = 1e-4
SCALE = 2.0
PROMPT = (3, 1, 4, 1, 5)


def greedy(id: str, tokens: tuple[int, ...] = PROMPT, *, count: int = 12) -> GenerateRequest:
    return GenerateRequest(
        id=id, tokens=tokens, sampling=Sampling(temperature=0.0, max_tokens=count)
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
        vllm_checkpoint(path, seed=number, eos_token_id=127)

    def published(self, number: int, *, without: str = "") -> WeightManifest:
        tensors = dict(read_tensors_of(self.checkpoint(number)))
        tensors.pop(without, None)
        self._open.append(
            publish(tensors, version=number, weights_id=number, directory=self._directory)
        )
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
        self._open.append(
            publish(adapters, version=number, weights_id=number, directory=self._directory)
        )
        return self._open[-1].manifest

    async def continued(self, number: int, request: GenerateRequest) -> GenerateResult:
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


class ExpertWeights(Weights):
    """Checkpoints of Qwen3-MoE, with experts of a width that vLLM pads on a CPU. The
    embedded engine does not compute them: transformers does.
    """

    def write(self, path: Path, number: int) -> None:
        torch.manual_seed(number)
        config = Qwen3MoeConfig(
            vocab_size=128,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            max_position_embeddings=512,
            initializer_range=0.1,
            eos_token_id=127,
            dtype="float32",
        )
        Qwen3MoeForCausalLM(config).save_pretrained(path)

    async def continued(self, number: int, request: GenerateRequest) -> GenerateResult:
        model = Qwen3MoeForCausalLM.from_pretrained(self.checkpoint(number), dtype=torch.float32)
        tokens, logprobs = list(request.tokens), list[float]()
        while len(logprobs) < request.sampling.max_tokens and 127 not in tokens:
            with torch.no_grad():
                row = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(row.argmax()))
            logprobs.append(float(row.max()))
        return GenerateResult(
            id=request.id,
            tokens=tuple(tokens[len(request.tokens) :]),
            logprobs=tuple(logprobs),
            versions=(),
            finish=FinishReason.LENGTH,
        )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


def spec_of(weights: Weights, vllm: ServerSpec, lora_scale: float | None = None) -> EngineSpec:
    return EngineSpec(
        id=EngineId("e0"),
        model=str(weights.model),
        max_slots=16,
        kv_tokens=16384,
        server=vllm,
        lora_scale=lora_scale,
    )


@asynccontextmanager
async def started(
    weights: Weights, tmp_path: Path, vllm: ServerSpec, lora_scale: float | None = None
) -> AsyncIterator[tuple[EngineClient, int]]:
    """Start an engine, and yield it with the id of its process."""
    present: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    present.set_result(None)
    link = in_process(
        spec_of(weights, vllm, lora_scale),
        module="rollweave.runtime.entrypoints.server_engine",
        log=tmp_path / "e0.log",
        env=environment(),
        model_ready=present,
    )
    engine = EngineClient("engine e0", link, start_s=VLLM_START_S, reply_s=120.0)
    try:
        await engine.ready()
        yield engine, engine._link.pid  # type: ignore[attr-defined]
    finally:
        await engine.close()


def shared_names(pids: list[int]) -> list[str]:
    """Return the shared memory of these processes that would be left if they were
    killed now.
    """
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [line for line in lines if " /dev/shm/" in line and not line.endswith("(deleted)")]


async def all_end(pids: list[int]) -> None:
    """Wait until none of these processes is left."""
    async with asyncio.timeout(30):
        while any(map(alive, pids)):  # noqa: ASYNC110 (nothing reports their ends)
            await asyncio.sleep(0.05)


async def agrees(engine: EngineClient, weights: Weights, number: int) -> None:
    """Assert that the engine serves exactly these weights."""
    there = await engine.generate(greedy("probe"))
    here = await weights.continued(number, greedy("probe"))
    assert there.tokens == here.tokens
    assert there.logprobs == pytest.approx(here.logprobs, abs=EXACT)


async def test_updates_are_exact_and_refused_ones_leave_the_old_weights(
    weights: Weights, tmp_path: Path
) -> None:
    """One server, because each takes tens of seconds to start."""
    async with started(weights, tmp_path, vllm_spec()) as (engine, _):
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


async def test_adapters_are_added_to_the_first_weights(weights: Weights, tmp_path: Path) -> None:
    async with started(weights, tmp_path, vllm_spec(), SCALE) as (engine, _):
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


async def requests_in_flight_continue_under_new_weights(
    engine: EngineClient, weights: Weights
) -> None:
    """The tokens of each version are those that its weights sample after the ones before."""
    requests = [greedy(f"r{number}", (number, *PROMPT), count=400) for number in range(8)]
    answers = [engine.generate(request) for request in requests]
    manifest = weights.published(2)
    await engine.stage(manifest)
    await asyncio.sleep(0.3)  # the server samples some tokens
    suspended = await engine.suspend()
    assert suspended.in_flight == 8
    await engine.load(manifest)
    engine.resume()
    results = await asyncio.gather(*answers)
    for request, result in list(zip(requests, results, strict=True))[:2]:
        assert [span.version for span in result.versions] == [1, 2]
        (before, after) = result.versions
        first = await weights.continued(1, greedy("first", request.tokens, count=before.end))
        assert result.tokens[: before.end] == first.tokens
        assert result.logprobs[: before.end] == pytest.approx(first.logprobs, abs=EXACT)
        context = (*request.tokens, *first.tokens)
        second = await weights.continued(2, greedy("second", context, count=400 - before.end))
        assert result.tokens[after.start :] == second.tokens
        assert result.logprobs[after.start :] == pytest.approx(second.logprobs, abs=EXACT)


async def test_the_weights_of_experts_are_exact_before_and_after_updates(tmp_path: Path) -> None:
    weights = ExpertWeights(tmp_path)
    async with started(weights, tmp_path, vllm_spec()) as (engine, _):
        await agrees(engine, weights, 0)
        for number in (1, 2):
            await engine.load(weights.published(number))
            await agrees(engine, weights, number)
    weights.close()


async def test_loss_of_the_server_names_the_signal_and_leaves_no_process(
    weights: Weights, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, vllm_spec()) as (engine, pid):
        server, *others = descendants(pid)
        turn = engine.generate(greedy("r0", count=400))
        await engine.stats()
        assert not shared_names([server, *others])
        os.kill(server, signal.SIGKILL)
        with pytest.raises(EngineLostError, match="vLLM ended: signal SIGKILL"):
            await turn
        await all_end([pid, server, *others])


async def test_two_ranks_load_their_slices_and_a_lost_engine_leaves_no_process(
    weights: Weights, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, vllm_spec(degree=2)) as (engine, pid):
        processes = [pid, *descendants(pid)]
        assert len(processes) > 4  # with the server, its engine core and two ranks
        await engine.load(weights.published(1))
        await agrees(engine, weights, 1)
        assert not shared_names(processes)
        os.kill(pid, signal.SIGKILL)  # not through the handle, which kills the whole group
        await asyncio.wait([engine.lost])
        await all_end(processes)


async def test_a_server_that_stops_during_an_update_is_killed_with_the_route(
    weights: Weights, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, vllm_spec(control_s=3.0)) as (engine, pid):
        processes = descendants(pid)
        turn = engine.generate(greedy("r0", count=400))
        await engine.suspend()
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        with pytest.raises(EngineLostError, match="vLLM did not answer /start_weight_update"):
            await engine.load(weights.published(1))
        with pytest.raises(EngineLostError):
            await turn
        await all_end([pid, *processes])


async def test_ranks_refuse_before_any_of_them_swaps(weights: Weights, tmp_path: Path) -> None:
    """The routes, with updates that the engine itself would have refused."""
    vllm = vllm_spec()
    server = VllmServer(spec_of(weights, vllm), read_shape(weights.model), tmp_path)
    control = VllmControl(server.url, token=server.token, limit_s=60.0)
    try:
        await until(lambda: control.connect())
        good = weights.published(1)
        update: dict[str, object] = {
            "part": "check",
            "location": good.location,
            "nbytes": good.nbytes,
            "tensors": [(one.name, one.dtype, one.shape, one.offset) for one in good.tensors],
        }
        await control.pause()
        for wrong in ({"nbytes": 5}, {"location": "/nowhere"}, {"part": "swap"}, {"x": 1}):
            await control.start_update()
            with pytest.raises(RefusedError, match="/update_weights with status 500"):
                await control.update({**update, **wrong})
        await control.start_update()
        await control.update(update)
        await control.update({"part": "swap"})
        await control.finish_update("1")
        await control.resume()
        stranger = VllmControl(server.url, token="guessed", limit_s=60.0)
        with pytest.raises(RefusedError, match="status 401"):
            await stranger.pause()
        await stranger.close()
    finally:
        await control.close()
        server.kill()
        await server.ended()


async def until(connect: Callable[[], Awaitable[None]]) -> None:
    """Call until it succeeds: the server needs tens of seconds to start."""
    async with asyncio.timeout(VLLM_START_S):
        while True:
            try:
                return await connect()
            except Exception:
                await asyncio.sleep(0.2)
