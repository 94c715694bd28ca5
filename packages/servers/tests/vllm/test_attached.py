"""Servers that a user has started: what they must be, who leases them, and what an
engine makes of one that others have used. A real vLLM is in `test_real.py`.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from benchmarks.harness import free_port
from packages.servers.tests.server_engines import (
    PROMPT,
    Weights,
    agrees,
    all_end,
    greedy,
    started,
    streamed_tokens_are_of_the_weights_that_they_name,
    tokens_are_sampled,
    updates_are_exact_and_refused_ones_leave_the_old_weights,
)
from packages.servers.tests.vllm_server import attached_spec, start_vllm_server
from rollweave.schema.base import EngineId
from rollweave.schema.errors import ConfigError, EngineError, EngineLostError
from rollweave.schema.serving import EngineSpec, ServerSpec
from rollweave_servers import attached
from rollweave_servers.attached import About, attach, check_servers, objection
from rollweave_servers.process import PLUGIN
from rollweave_servers.vllm import VllmKind
from rollweave_servers.vllm_control import ABORT, ATTACHED_ROUTES, GENERATE, ROUTES
from tests.support.engines import tiny_checkpoint, vllm_checkpoint

ABOUT = About(
    protocol=1,
    architectures=("Qwen3ForCausalLM",),
    sizes={"vocab_size": 128, "hidden_size": 64, "tie_word_embeddings": True},
    dtype="float32",
    context=300,
    logprobs="raw_logprobs",
    slots=64,
    policy="priority",
    kv_tokens=65536,
    prefix_cache=True,
    device="cpu",
    transfer="rollweave",
    grammars="guidance",
    constrains_reasoning=True,
    routes=(*ROUTES, *ATTACHED_ROUTES, GENERATE, ABORT),
)


def spec_for(model: Path, server: ServerSpec) -> EngineSpec:
    return EngineSpec(
        id=EngineId("e0"), model=str(model), max_slots=16, kv_tokens=16384, server=server
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def port(weights: Weights) -> Iterator[int]:
    """The port of a server, which is used by one test after the other."""
    port = free_port()
    with start_vllm_server(weights.model, port):
        yield port


@pytest.mark.extended
async def test_updates_are_exact_and_the_next_engine_begins_with_the_model(
    weights: Weights, port: int, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, attached_spec(port)) as (engine, _):
        await updates_are_exact_and_refused_ones_leave_the_old_weights(engine, weights)
    async with started(weights, tmp_path, attached_spec(port, run="h:/other")) as (engine, _):
        await agrees(engine, weights, 0)
        assert (await engine.generate(greedy("again"))).versions[0].version == 0


async def test_streamed_tokens_are_of_the_weights_that_they_name(
    weights: Weights, port: int, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, attached_spec(port)) as (engine, _):
        await streamed_tokens_are_of_the_weights_that_they_name(engine, weights, until_the_end=True)


async def test_heartbeats_have_the_kv_that_the_server_reports(
    weights: Weights, port: int, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, attached_spec(port)) as (engine, _):
        turn = engine.generate(greedy("held", count=400))
        await tokens_are_sampled(engine)
        assert (await engine.suspend()).in_flight == 1
        async with asyncio.timeout(60):
            while not (used := (await engine.beat()).kv_used):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(PROMPT) < used < 16384
        engine.resume()
        await turn
        async with asyncio.timeout(60):
            while (await engine.beat()).kv_used:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_server_left_in_an_update_is_taken_over_by_its_run(
    weights: Weights, port: int, tmp_path: Path
) -> None:
    async with started(weights, tmp_path, attached_spec(port)) as (engine, pid):
        await engine.load(weights.published(1))
        await engine.suspend()
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait([engine.lost])
    async with started(weights, tmp_path, attached_spec(port)) as (engine, _):
        await agrees(engine, weights, 0)


class Guarded:
    """The guard of a server, behind a listener of this process."""

    def __init__(self, guard: Any) -> None:
        self._guard, self.requests = guard, asyncio.Queue[str]()

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", self._handle)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        headers = [
            (name.lower().encode(), value.encode()) for name, value in request.headers.items()
        ]
        sent, body = list[dict[str, Any]](), await request.read()

        async def receive() -> dict[str, Any]:
            return {"body": body}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self._guard({"type": "http", "path": request.path, "headers": headers}, receive, send)
        self.requests.put_nowait(request.path)
        return web.Response(status=sent[0]["status"], body=sent[1]["body"])


async def healthy(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_a_lease_is_renewed_while_its_engine_does_something_else(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine restores a model for ten minutes, and sends nothing. The time is
    injected.
    """
    now, wake = 0.0, asyncio.Queue[None]()

    async def sleep(seconds: float) -> None:
        nonlocal now
        await wake.get()
        now += seconds

    monkeypatch.setenv(plugin.TOKEN, "t")
    clock = SimpleNamespace(monotonic=lambda: now)  # the event loop keeps its own
    monkeypatch.setattr(plugin.rollweave_leases, "time", clock)
    guard = plugin.LeasedGuard(healthy)
    server = Guarded(guard)
    async with asyncio.timeout(20), server as url:
        token = guard._leases.take("h:/first e0")
        leased = attached.AttachedServer("vLLM", url, token, sleep=sleep)
        ended = asyncio.create_task(leased.ended())
        while now < 600:
            wake.put_nowait(None)
            assert await server.requests.get() == "/health"
            assert guard._leases.take("h:/second e0") is None
        leased.kill()
        assert "was given up" in await ended
        assert guard._leases.take("h:/second e0") is not None


async def test_two_runs_never_have_one_server(weights: Weights, port: int, tmp_path: Path) -> None:
    second = attached_spec(port, run="h:/second", start_s=1.0)
    async with started(weights, tmp_path, attached_spec(port, run="h:/first")):
        with pytest.raises(EngineError, match=r"no vLLM server was free .* h:/first e0"):
            await attach(VllmKind(), spec_for(weights.model, second))
        with pytest.raises(ConfigError, match=r"must be free, got a lease of h:/first e0"):
            check_servers(VllmKind(), spec_for(weights.model, second))
        (about,) = check_servers(
            VllmKind(), spec_for(weights.model, attached_spec(port, run="h:/first"))
        )
        assert about.holder == "h:/first e0"
    check_servers(VllmKind(), spec_for(weights.model, second))


@pytest.mark.slow
async def test_a_killed_server_is_noticed_and_its_return_too(
    weights: Weights, tmp_path: Path
) -> None:
    port = free_port()
    with start_vllm_server(weights.model, port) as process:
        async with started(weights, tmp_path, attached_spec(port)) as (engine, pid):
            turn = engine.generate(greedy("r0", count=400))
            await engine.stats()
            process.kill()
            with pytest.raises(EngineLostError, match="vLLM"):
                await turn
            await all_end([pid])
    async with asyncio.TaskGroup() as group:

        async def attach() -> None:
            async with started(weights, tmp_path, attached_spec(port)) as (engine, _):
                await agrees(engine, weights, 0)

        waiting = group.create_task(attach())
        with start_vllm_server(weights.model, port) as process:
            await waiting
            assert process.poll() is None


def test_the_model_and_the_settings_of_a_server_are_checked(
    weights: Weights, port: int, tmp_path: Path
) -> None:
    def problem(model: Path, server: ServerSpec, **changes: object) -> str:
        with pytest.raises(ConfigError) as error:
            check_servers(VllmKind(), msgspec.structs.replace(spec_for(model, server), **changes))
        return str(error.value).replace(str(port), "P")

    vllm_checkpoint(tmp_path)
    other = tiny_checkpoint(tmp_path, vocab_size=256)
    good, where = attached_spec(port), "vLLM at http://127.0.0.1:P"
    wrong = "must have a model with vocab_size 256, got 128"
    assert problem(other, good) == f"{where} {wrong}"
    wrong = "must have --dtype bfloat16, got float32"
    assert problem(weights.model, good, dtype="bfloat16") == f"{where} {wrong}"
    wrong = "must have --max-num-seqs of at least 17, got 16"
    assert problem(weights.model, good, max_slots=17) == f"{where} {wrong}"
    wrong = "must accept the token that is given, got a refusal"
    assert problem(weights.model, attached_spec(port, token="wrong")) == f"{where} {wrong}"
    nowhere = problem(weights.model, attached_spec(9))
    assert nowhere.startswith("vLLM at http://127.0.0.1:9 must answer, got ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": 2}, "must have version 1 of Rollweave's plug-in, got version 2"),
        ({"routes": (GENERATE,), "version": "0.9"}, "must have the routes /pause, "),
        ({"transfer": "nccl"}, "must have weight transfer rollweave, got nccl"),
        ({"architectures": ("LlamaForCausalLM",)}, "architecture Qwen3ForCausalLM, got Llama"),
        ({"grammars": "auto"}, "must have --structured-outputs-config.backend guidance, got auto"),
        (
            {"constrains_reasoning": False},
            "must have --structured-outputs-config.enable_in_reasoning true, got false",
        ),
        ({"logprobs": "processed_logprobs"}, "--logprobs-mode raw_logprobs, got processed"),
        ({"context": 299}, "must have --max-model-len of at least 300, got 299"),
        ({"policy": "fcfs"}, "must have --scheduling-policy priority, got fcfs"),
        ({"prefix_cache": False}, "must have prefix caching true, got false"),
        ({"kv_tokens": 1024}, "must have a KV cache of at least 16384, got 1024"),
        ({"chunked_prefill": True}, "must have chunked prefill on a CPU false, got true"),
        ({"unreadable": "PermissionError: no"}, "must be on the host of its engine's process"),
    ],
)
def test_each_rule_names_what_is_found(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    server = msgspec.structs.replace(attached_spec(1), context=300)
    spec = spec_for(vllm_checkpoint(tmp_path), server)
    assert objection(VllmKind(), ABOUT, spec) == ""
    assert words in objection(VllmKind(), msgspec.structs.replace(ABOUT, **changes), spec)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(PLUGIN))
    import rollweave_vllm_leases

    yield rollweave_vllm_leases
    names = ("rollweave_vllm_leases", "rollweave_vllm", "rollweave_leases")
    for name in names:
        sys.modules.pop(name)


def test_both_sides_have_the_same_routes(plugin: ModuleType) -> None:
    for name in ("PROTOCOL", "ABOUT", "LEASE", "RELEASE"):
        assert getattr(plugin.rollweave_leases, name) == getattr(attached, name)


def test_a_silent_holder_loses_its_lease(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(plugin.rollweave_leases.time, "monotonic", lambda: now)
    leases = plugin.rollweave_leases.Leases()
    first = leases.take("a")
    now += plugin.rollweave_leases.LEASE_S
    assert leases.take("b") is None
    assert leases.admits(first)
    now += plugin.rollweave_leases.LEASE_S
    assert (leases.holder, leases.take("b")) == ("a", None)
    now += 1
    assert leases.holder == ""
    assert leases.admits(first), "nobody has taken the server over"
    now += plugin.rollweave_leases.LEASE_S + 1
    second = leases.take("b")
    assert not leases.admits(first)
    again = leases.take("b")  # the same engine, started anew
    assert not leases.admits(second)
    assert leases.admits(again)
    leases.release()
    assert not leases.admits(again)
    assert not leases.admits("")


def test_a_server_without_a_token_does_not_start(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(plugin.TOKEN, raising=False)
    with pytest.raises(SystemExit, match="ROLLWEAVE_VLLM_TOKEN must be set"):
        plugin.serve_alone()


def test_only_the_first_process_of_a_server_outlives_its_parent(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's shell may end before the server."""
    import rollweave_vllm

    bound = list[bool]()
    monkeypatch.setattr(rollweave_vllm.rollweave_vllm_constraints, "register", lambda: None)
    monkeypatch.setattr(rollweave_vllm, "end_with_parent", lambda: bound.append(True))
    factory = type("Factory", (), {"_registry": {rollweave_vllm.NAME: None}})
    transfer = ModuleType("factory")
    transfer.WeightTransferEngineFactory = factory  # type: ignore[attr-defined]
    path = "vllm.distributed.weight_transfer.factory"
    for end in (1, 2, 3, 4):
        monkeypatch.setitem(sys.modules, ".".join(path.split(".")[:end]), transfer)
    register: Callable[[], None] = rollweave_vllm.register
    monkeypatch.setenv(plugin.MAIN, str(os.getpid()))
    register()
    assert not bound
    monkeypatch.setenv(plugin.MAIN, "1")
    register()
    assert bound


def test_vllm_is_made_to_name_versions_in_each_part(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RequestState:
        def _new_completion_output(self, final: list[str] | None) -> SimpleNamespace:
            return SimpleNamespace(weight_versions=final)

        def _weight_version_spans(self) -> list[str]:
            return ["so far"]

    register_spans = plugin.register_spans
    register_spans()  # there is no vLLM here
    module = SimpleNamespace(RequestState=RequestState)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.output_processor", module)
    for part in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, part, SimpleNamespace(__path__=[]))
    register_spans()
    patched = RequestState._new_completion_output
    register_spans()
    assert RequestState._new_completion_output is patched
    state = RequestState()
    assert state._new_completion_output(None).weight_versions == ["so far"]
    assert state._new_completion_output(["all"]).weight_versions == ["all"]
    del RequestState._weight_version_spans, RequestState._new_completion_output
    register_spans()
    assert not hasattr(RequestState, "_new_completion_output")
