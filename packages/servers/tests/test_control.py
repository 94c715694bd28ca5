"""Control calls are in the order of their server, have deadlines, are checked
afterwards, and name their route.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import RelayAddress, TensorMeta
from rollweave_servers import sglang_control, vllm_control
from rollweave_servers.control import ControlError, RefusedError
from rollweave_servers.sglang_control import CheckpointMemory, SglangControl
from rollweave_servers.vllm_control import VllmControl
from rollweave_servers.vllm_group import Announced
from tests.support.engines import manifest

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def answering(routes: Mapping[str, str], handle: Answer) -> AsyncIterator[str]:
    """Serve these routes, and yield the address."""
    app = web.Application()
    for route, method in routes.items():
        app.router.add_route(method, route, handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def said(value: object = None, *, status: int = 200) -> Answer:
    """Answer a request with this value, or with nothing."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({} if value is None else value, status=status)

    return answer


class FakeVllm:
    """Answers every control route with what `answers` has for it, else with success."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answers: dict[str, Answer] = {}
        self.paused, self.label, self.url = False, "default", ""

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


class FakeSglang:
    """Answers the control routes, and those in `lies` with nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.lies: set[str] = set()
        self.paused, self.label, self.ranks = False, "0", ["a", "b"]

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


Vllm = tuple[FakeVllm, VllmControl]
Sglang = tuple[FakeSglang, SglangControl]


@pytest.fixture
async def vllm() -> AsyncIterator[Vllm]:
    fake = FakeVllm()
    async with answering({**vllm_control.ROUTES, "/metrics": "GET"}, fake.handle) as fake.url:
        control = VllmControl(fake.url, token="secret", limit_s=60.0)
        yield fake, control
        await control.close()


@pytest.fixture
async def sglang() -> AsyncIterator[Sglang]:
    fake = FakeSglang()
    async with answering(sglang_control.ROUTES, fake.handle) as url:
        control = SglangControl(url, token="secret", limit_s=60.0, kv_tokens=512)
        await control.connect()
        yield fake, control
        await control.close()


def weights() -> CheckpointMemory:
    return CheckpointMemory(manifest(7), Path("/folder"), -1)


async def test_an_update_of_vllm_pauses_keeps_and_clears(vllm: Vllm) -> None:
    fake, control = vllm
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


async def test_an_update_of_sglang_retracts_loads_flushes_and_continues(sglang: Sglang) -> None:
    fake, control = sglang
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
        ("/pause", lambda control: control.pause(), "not paused after /pause"),
        ("/finish_weight_update", lambda control: control.finish_update("7"), "'7', got 'default'"),
    ],
)
async def test_a_success_of_vllm_without_effect_is_noticed(
    vllm: Vllm, route: str, call: Callable[[VllmControl], Awaitable[None]], rule: str
) -> None:
    fake, control = vllm
    fake.answers[route] = said()
    with pytest.raises(ControlError, match=rule):
        await call(control)


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
async def test_a_success_of_sglang_without_effect_is_noticed(
    sglang: Sglang, route: str, call: Callable[[SglangControl], Awaitable[None]], rule: str
) -> None:
    fake, control = sglang
    fake.lies.add(route)
    with pytest.raises(ControlError, match=rule):
        await call(control)


async def test_a_silent_route_is_named_when_its_time_is_over(vllm: Vllm) -> None:
    fake, _ = vllm

    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    fake.answers["/update_weights"] = hang
    hasty = VllmControl(fake.url, token="secret", limit_s=0.1)
    with pytest.raises(ControlError, match=r"did not answer /update_weights within 0\.1 s"):
        await hasty.update({})
    await hasty.close()


async def test_an_error_is_a_refusal_with_the_text(vllm: Vllm) -> None:
    fake, control = vllm
    fake.answers["/update_weights"] = said({"error": "no such tensor"}, status=500)
    with pytest.raises(RefusedError, match=r"/update_weights with status 500: .*no such tensor"):
        await control.update({})


async def test_metrics_are_read_and_may_be_missing(vllm: Vllm) -> None:
    fake, control = vllm
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


async def test_a_server_that_is_gone_breaks_off() -> None:
    control = VllmControl("http://127.0.0.1:9", token="secret", limit_s=5.0)
    with pytest.raises(ControlError, match="/resume broke off"):
        await control.resume()
    await control.close()


@pytest.mark.parametrize("kept", [True, False])
async def test_a_rank_that_kept_its_weights_is_noticed(sglang: Sglang, kept: bool) -> None:
    """Weights that all ranks had before are accepted."""
    fake, control = sglang
    if kept:
        fake.ranks = ["a", "b-"]  # so that one of them is as before after the update
    former: Any = ("a+", "b" if kept else "b+")
    control._checksums = former
    if kept:
        with pytest.raises(ControlError, match="ranks have weights of several versions"):
            await control.swap(weights(), "7")
    else:
        await control.swap(weights(), "7")
        assert fake.label == "7"


async def test_a_taken_server_of_sglang_ends_its_requests_and_waits(sglang: Sglang) -> None:
    fake, control = sglang
    fake.paused = True
    fake.calls.clear()
    await control.reset("7")
    assert fake.calls == [
        ("/continue_generation", {}),
        ("/pause_generation", {"mode": "abort"}),
        ("/ready", None),
    ]
    assert fake.paused
    fake.lies.add("/continue_generation")
    with pytest.raises(ControlError, match="SGLang is not ready after /continue_generation"):
        await control.resume()
    fake.paused = False
    fake.lies.add("/pause_generation")
    with pytest.raises(ControlError, match="SGLang is ready after /pause_generation"):
        await control.reset("7")


LOADED = [
    {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.25},
    {"num_running_reqs": 2, "token_usage": 0.5},
]


@pytest.mark.parametrize(
    ("answer", "gauges"),
    [
        (said({"loads": LOADED}), {"running": 5, "waiting": 1, "kv_share": 0.5}),
        (said({"loads": []}), {"running": 0, "waiting": 0, "kv_share": 0.0}),
        (said({"other": 1}), {}),
        (said({"loads": LOADED}, status=500), {}),
    ],
)
async def test_the_loads_of_sglang_are_added_up(answer: Answer, gauges: dict[str, float]) -> None:
    async with answering({sglang_control.LOADS: "GET"}, answer) as url:
        control = SglangControl(url, token="secret", limit_s=60.0, kv_tokens=512)
        assert await control.gauges() == gauges
        await control.close()


@pytest.mark.parametrize(
    ("route", "answer", "error"),
    [
        ("/server_info", {"max_total_num_tokens": 511, "tp_size": 2}, "room for 511 tokens of KV"),
        ("/server_info", {"tp_size": 2}, "room for None tokens of KV"),
        ("/server_info", {"max_total_num_tokens": 512}, "SGLang's answer to /server_info: "),
        ("/weights_checker", {"ranks": []}, "SGLang must have 2 ranks, got 0"),
        ("/weights_checker", {}, "SGLang's answer to /weights_checker: "),
    ],
)
async def test_a_server_of_sglang_that_cannot_serve_is_named(
    route: str, answer: dict[str, Any], error: str
) -> None:
    about = {"max_total_num_tokens": 512, "tp_size": 2, "ranks": [{"per_gpu_checksum": "a"}] * 2}

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(answer if request.path == route else about)

    async with answering(sglang_control.ROUTES, handle) as url:
        control = SglangControl(url, token="secret", limit_s=60.0, kv_tokens=512)
        with pytest.raises(ControlError, match=error):
            await control.connect()
        await control.close()


async def test_one_rank_of_sglang_needs_no_checksums() -> None:
    asked = list[str]()

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.json_response({"max_total_num_tokens": 512, "tp_size": 1})

    async with answering(sglang_control.ROUTES, handle) as url:
        control = SglangControl(url, token="secret", limit_s=60.0, kv_tokens=512)
        await control.connect()
        await control.close()
    assert asked == ["/server_info"]


async def test_an_update_of_sglang_that_fails_is_named(sglang: Sglang) -> None:
    _, control = sglang
    fails = {"success": False, "message": "out of memory"}
    async with answering(sglang_control.ROUTES, said(fails)) as control._url:
        with pytest.raises(ControlError, match="SGLang's update failed: out of memory"):
            await control.swap(weights(), "7")


@pytest.mark.parametrize(
    ("sender", "names", "error"),
    [
        (None, ("a",), "vLLM receives versions from the trainer alone"),
        ("here", ("a", "a"), "tensor names must be distinct"),
        ("here", ("b",), "not of this model"),
        ("here", ("a",), ""),
    ],
)
def test_only_announced_tensors_of_the_model_are_taken(
    sender: str | None, names: tuple[str, ...], error: str
) -> None:
    class Shape:
        def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
            if shapes != {"a": (2, 3)}:
                raise WeightsError("not of this model")

    metas = tuple(
        TensorMeta(name=name, dtype="float32", shape=(2, 3), offset=0, nbytes=24) for name in names
    )
    address = RelayAddress(host=sender, port=1, secret=b"") if sender else None
    given = msgspec.structs.replace(manifest(7), tensors=metas, sender=address)
    shape: Any = Shape()
    if error:
        with pytest.raises(WeightsError, match=error):
            Announced(given, shape)
    else:
        assert Announced(given, shape).manifest == given
