"""Control calls have deadlines, are checked afterwards, and name their route."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from rollweave.engine.servers.control import ControlError, RefusedError
from rollweave.engine.servers.vllm_control import ROUTES, VllmControl

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeServer:
    """Answers every control route with what `answers` has for it, else with success."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answers: dict[str, Answer] = {}
        self.paused, self.label = False, "default"
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        self.calls.append(str(request.rel_url))
        if request.path in self.answers:
            return await self.answers[request.path](request)
        match request.path:
            case "/pause" | "/resume":
                self.paused = request.path == "/pause"
            case "/finish_weight_update":
                self.label = (await request.json())["weight_version"]
        return web.json_response({"is_paused": self.paused, "weight_version": self.label})


@pytest.fixture
async def server() -> AsyncIterator[tuple[FakeServer, VllmControl]]:
    fake, app = FakeServer(), web.Application()
    for route, method in {**ROUTES, "/metrics": "GET"}.items():
        app.router.add_route(method, route, fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    control = VllmControl(fake.url, token="secret", limit_s=60.0)
    yield fake, control
    await control.close()
    await runner.cleanup()


async def test_an_update_pauses_keeps_and_clears(server: tuple[FakeServer, VllmControl]) -> None:
    fake, control = server
    await control.connect()
    await control.pause()
    await control.start_update()
    await control.update({"part": "check"})
    await control.finish_update("7")
    await control.resume()
    assert fake.calls == [
        "/init_weight_transfer_engine",
        "/pause?mode=keep&clear_cache=true",
        "/is_paused",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/weight_info",
        "/resume",
        "/is_paused",
    ]


async def test_a_silent_route_is_named_when_its_time_is_over(
    server: tuple[FakeServer, VllmControl],
) -> None:
    fake, _ = server

    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    fake.answers["/update_weights"] = hang
    hasty = VllmControl(fake.url, token="secret", limit_s=0.5)
    with pytest.raises(ControlError, match=r"did not answer /update_weights within 0\.5 s"):
        await hasty.update({})
    await hasty.close()


async def test_an_error_is_a_refusal_with_the_text(server: tuple[FakeServer, VllmControl]) -> None:
    fake, control = server

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "no such tensor"}, status=500)

    fake.answers["/update_weights"] = refuse
    with pytest.raises(RefusedError, match=r"/update_weights with status 500: .*no such tensor"):
        await control.update({})


@pytest.mark.parametrize(
    ("route", "call", "rule"),
    [
        ("/pause", lambda control: control.pause(), "not paused after /pause"),
        ("/finish_weight_update", lambda control: control.finish_update("7"), "'7', got 'default'"),
    ],
)
async def test_a_success_without_effect_is_noticed(
    server: tuple[FakeServer, VllmControl],
    route: str,
    call: Callable[[VllmControl], Awaitable[None]],
    rule: str,
) -> None:
    fake, control = server

    async def lie(_: web.Request) -> web.StreamResponse:
        return web.json_response({})

    fake.answers[route] = lie
    with pytest.raises(ControlError, match=rule):
        await call(control)


async def test_metrics_are_read_and_may_be_missing(server: tuple[FakeServer, VllmControl]) -> None:
    fake, control = server
    assert await control.gauges() == {}  # this server has none
    text = (
        "# HELP vllm:num_requests_running How many\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0\n'
    )

    async def metrics(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text)

    fake.answers["/metrics"] = metrics
    assert await control.gauges() == {"running": 3.0, "kv_share": 0.25}


async def test_a_server_that_is_gone_breaks_off(server: tuple[FakeServer, VllmControl]) -> None:
    control = VllmControl("http://127.0.0.1:9", token="secret", limit_s=5.0)
    with pytest.raises(ControlError, match="/resume broke off"):
        await control.resume()
    await control.close()
