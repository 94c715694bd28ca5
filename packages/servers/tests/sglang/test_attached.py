"""SGLang servers that a user has started. SGLang itself was never run: see
`sglang_server.py`.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.harness import free_port
from packages.servers.tests import server_engines
from packages.servers.tests.sglang_package import start_sglang_server
from packages.servers.tests.vllm_server import attached_spec
from rollweave.schema.errors import ConfigError, EngineLostError
from rollweave.schema.serving import EngineSpec, ServerSpec
from rollweave_servers.attached import About, check_servers, objection
from rollweave_servers.sglang import SglangKind

KIND = SglangKind()
ABOUT = About(
    protocol=1,
    architectures=("Qwen3ForCausalLM",),
    sizes={"vocab_size": 128, "hidden_size": 64},
    dtype="float32",
    context=308,
    slots=16,
    policy="priority",
    kv_tokens=16384,
    prefix_cache=True,
    routes=KIND.leased_routes,
)


def leased(port: int, *, run: str = "h:/run", context: int = 512) -> ServerSpec:
    return attached_spec(port, kind="sglang", run=run, context=context)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> server_engines.Weights:
    return server_engines.Weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def port(
    weights: server_engines.Weights, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """The port of a server, which is used by one test after the other."""
    port = free_port()
    with start_sglang_server(tmp_path_factory.mktemp("sglang"), weights.model, port):
        yield port


@pytest.mark.extended
async def test_updates_are_exact_and_the_next_engine_begins_with_the_model(
    weights: server_engines.Weights, port: int, tmp_path: Path
) -> None:
    spec = leased(port)
    async with server_engines.started(weights, tmp_path, spec) as (engine, _):
        await server_engines.updates_are_exact_and_refused_ones_leave_the_old_weights(
            engine, weights
        )
        second = server_engines.spec_of(weights, leased(port, run="h:/second"))
        with pytest.raises(ConfigError, match=r"SGLang at .* must be free, got a lease of h:/run"):
            check_servers(KIND, second)
    async with server_engines.started(weights, tmp_path, spec) as (engine, _):
        await server_engines.agrees(engine, weights, 0)
        assert (await engine.generate(server_engines.greedy("again"))).versions[0].version == 0


@pytest.mark.extended
async def test_a_server_left_paused_with_requests_is_taken_over_by_its_run(
    weights: server_engines.Weights, port: int, tmp_path: Path
) -> None:
    spec = leased(port)
    async with server_engines.started(weights, tmp_path, spec) as (engine, pid):
        await engine.load(weights.published(1))
        turn = engine.generate(server_engines.greedy("long", count=400))
        await engine.suspend()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineLostError):
            await turn
        await asyncio.wait([engine.lost])
    async with server_engines.started(weights, tmp_path, spec) as (engine, _):
        await server_engines.agrees(engine, weights, 0)
        assert (await engine.stats()).running == 0


def test_the_server_describes_itself(weights: server_engines.Weights, port: int) -> None:
    spec = server_engines.spec_of(weights, leased(port))
    (about,) = check_servers(KIND, spec)
    assert (about.version, about.slots, about.kv_tokens) == ("0.5.23", 16, 16384)
    with pytest.raises(ConfigError, match="must have --dtype bfloat16, got float32"):
        check_servers(KIND, msgspec.structs.replace(spec, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"routes": ()}, "must have the routes /pause_generation, "),
        ({"policy": "fcfs"}, "must have --enable-priority-scheduling true, got false"),
        ({"preempts": True}, "must have --disable-priority-preemption true, got false"),
        ({"context": 307}, "must have --context-length of at least 308, got 307"),
        ({"slots": 0}, "must have --max-running-requests of at least 16, got 0"),
        ({"replicas": 2}, "must have --dp-size 1, got 2"),
    ],
)
def test_each_rule_names_what_is_found(
    weights: server_engines.Weights, changes: dict[str, object], words: str
) -> None:
    spec = server_engines.spec_of(weights, leased(1, context=300))
    assert objection(KIND, ABOUT, spec) == ""
    assert words in objection(KIND, msgspec.structs.replace(ABOUT, **changes), spec)
    fixed: EngineSpec = msgspec.structs.replace(spec, deterministic=True)
    assert "--enable-deterministic-inference true, got false" in objection(KIND, ABOUT, fixed)
