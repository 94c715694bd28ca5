"""Connects the suites of this folder to engines of all kinds."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.harness import free_port
from packages.servers.tests.sglang_package import sglang_spec
from packages.servers.tests.vllm_server import attached_spec, start_vllm_server
from rollweave.engine.clients.client import EngineClient, in_process, in_thread
from rollweave.engine.clients.http import HttpEngine
from rollweave.io.child import child_of
from rollweave.schema.base import EngineId
from rollweave.schema.serving import EngineSpec
from tests.engine.clients.conformance.backends import Connect, over_http
from tests.support import engines
from tests.support.echo_engine import EchoLoop


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.vllm_checkpoint(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def vllm_server(vllm_model: Path) -> Iterator[Callable[[], int]]:
    """Return the port of a server, which starts when it is first needed."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start() -> int:
            port = free_port()
            stack.enter_context(start_vllm_server(vllm_model, port, "--slots", "4"))
            return port

        yield start


@pytest.fixture
async def connect(
    tmp_path: Path, model: Path, vllm_model: Path, vllm_server: Callable[[], int]
) -> AsyncIterator[Connect]:
    """Start engines, and end all of them."""
    clients: list[EngineClient | HttpEngine] = []

    def start(
        kind: str, *, broken: bool = False, reply_s: float = 20.0
    ) -> EngineClient | HttpEngine:
        server = None
        if kind == "vllm":
            server = engines.vllm_spec()
        elif kind == "sglang":
            server = sglang_spec(tmp_path)
        elif kind == "attached":
            server = attached_spec(vllm_server())
        path = "broken" if broken else str(vllm_model if kind in ("vllm", "attached") else model)
        spec = EngineSpec(
            id=EngineId("e0"),
            model=path,
            max_slots=4,
            kv_tokens=512,
            server=server,
        )
        model_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(model_ready.set_result, None)
        if "process" not in kind and server is None:
            link = in_thread(
                spec, EchoLoop if "fake" in kind else engines.real_loop(), model_ready=model_ready
            )
        else:
            module = (
                "tests.support.echo_engine"
                if "fake" in kind
                else f"rollweave.runtime.entrypoints.{'engine' if server is None else 'server_engine'}"
            )
            link = in_process(
                spec,
                spawn=child_of(module, env=engines.environment()),
                log=tmp_path / "logs" / "e0.log",
                model_ready=model_ready,
            )
        start_s = 60.0 if server is None else server.start_s
        engine = EngineClient("engine e0", link, start_s=start_s, reply_s=reply_s)
        clients.append(engine)
        if "HTTP" in kind:
            clients.append(over_http(engine))
        return clients[-1]

    yield start
    for client in reversed(clients):
        await client.close()
