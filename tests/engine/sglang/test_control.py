"""Control calls are in SGLang's order, and are checked afterwards."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from rollweave.engine.servers.control import ControlError
from rollweave.engine.servers.sglang_control import ROUTES, CheckpointMemory, SglangControl
from tests.support.engines import manifest


class FakeServer:
    """Answers the control routes, and those in `lies` with nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.lies: set[str] = set()
        self.paused, self.label, self.ranks = False, "0", ["a", "b"]
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path, body))
        lies = request.path in self.lies
        match request.path:
            case "/pause_generation" | "/continue_generation" if not lies:
                self.paused = request.path == "/pause_generation"
            case "/update_weights_from_disk" if not lies:
                self.label = body["weight_version"]
                self.ranks = [f"{rank}+" for rank in self.ranks]
            case "/ready":
                return web.Response(status=503 if self.paused else 200)
        return web.json_response(
            {
                "success": True,
                "max_total_num_tokens": 512,
                "tp_size": 2,
                "weight_version": self.label,
                "ranks": [{"per_gpu_checksum": rank} for rank in self.ranks],
            }
        )


@pytest.fixture
async def server() -> AsyncIterator[tuple[FakeServer, SglangControl]]:
    fake, app = FakeServer(), web.Application()
    for route, method in ROUTES.items():
        app.router.add_route(method, route, fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    control = SglangControl(fake.url, token="secret", limit_s=60.0, kv_tokens=512)
    yield fake, control
    await control.close()
    await runner.cleanup()


def weights() -> CheckpointMemory:
    return CheckpointMemory(manifest(7), Path("/folder"), -1)


async def test_an_update_retracts_loads_flushes_and_continues(
    server: tuple[FakeServer, SglangControl],
) -> None:
    fake, control = server
    await control.connect()
    await control.pause()
    await control.check(weights())
    await control.swap(weights(), "7")
    await control.resume()
    update = {"model_path": "/folder", "weight_version": "7", "flush_cache": True}
    assert fake.calls == [
        ("/server_info", None),
        ("/weights_checker", {"action": "checksum"}),
        ("/pause_generation", {"mode": "retract"}),
        ("/ready", None),
        ("/server_info", None),
        ("/update_weights_from_disk", update),
        ("/model_info", None),
        ("/weights_checker", {"action": "checksum"}),
        ("/continue_generation", {}),
        ("/ready", None),
    ]


@pytest.mark.parametrize(
    ("route", "call", "rule"),
    [
        ("/pause_generation", lambda control: control.pause(), "is ready after /pause_generation"),
        (
            "/update_weights_from_disk",
            lambda control: control.swap(weights(), "7"),
            "must be version '7', got '0'",
        ),
    ],
)
async def test_a_success_without_effect_is_noticed(
    server: tuple[FakeServer, SglangControl],
    route: str,
    call: Callable[[SglangControl], Awaitable[None]],
    rule: str,
) -> None:
    fake, control = server
    await control.connect()
    fake.lies.add(route)
    with pytest.raises(ControlError, match=rule):
        await call(control)


async def test_a_rank_that_kept_its_weights_is_noticed(
    server: tuple[FakeServer, SglangControl],
) -> None:
    fake, control = server
    await control.connect()
    fake.ranks = ["a", "b-"]  # so that one of them is as before after the update
    control._checksums = ("a+", "b")
    with pytest.raises(ControlError, match="ranks have weights of several versions"):
        await control.swap(weights(), "7")


async def test_weights_that_all_ranks_had_before_are_accepted(
    server: tuple[FakeServer, SglangControl],
) -> None:
    fake, control = server
    await control.connect()
    control._checksums = ("a+", "b+")
    await control.swap(weights(), "7")
    assert fake.label == "7"
