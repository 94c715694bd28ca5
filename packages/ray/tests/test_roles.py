"""Methods of a role that Ray Serve executes in place of its workers."""

import asyncio
import importlib.util
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from rollweave import Cluster, ConfigError, Worker, WorkerError, register
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.roles.role import UNAVAILABLE, ServerlessMethods
from rollweave.runtime.roles.serving import constructor_codec, method_codec
from rollweave.runtime.roles.worker import hw_mapping, register_serverless
from rollweave.schema.roles import CallMethod, DeployedRole, Returned
from rollweave.schema.rollouts import IDEMPOTENCY_KEY
from rollweave_ray.applications import RoleApp


class Judge(Worker):
    """Looks for a word in answers."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.calls = 0

    @register_serverless(timeout_s=300)
    def score(self, answers: tuple[str, ...]) -> tuple[float, ...]:
        self.calls += 1
        if not all(answers):
            raise ValueError("answers must not be empty")
        return tuple(float(self.word in answer) for answer in answers)

    @register()
    def words(self) -> str:
        return self.word


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("rollweave-function-*"))


@pytest.fixture
async def platform(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[RoleApp, str]]:
    """An instance behind HTTP, and its URL."""
    monkeypatch.setattr("rollweave.rollout.http_service.FIRST_RETRY_S", 0.01)
    monkeypatch.setattr("os.chdir", lambda _: None)
    arguments = constructor_codec(Judge).encode((), {"word": "blue"})
    role = DeployedRole(name="judge", reference=f"{__name__}:Judge", arguments=arguments)
    instance = RoleApp(role, b"", b"")

    async def serve(request: web.Request) -> web.Response:
        status, body = await instance.answer(request.headers[IDEMPOTENCY_KEY], await request.read())
        return web.Response(status=status, body=body)

    app = web.Application()
    app.add_routes([web.post("/judge", serve)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield instance, f"http://127.0.0.1:{runner.addresses[0][1]}/judge"
    await runner.cleanup()


async def test_a_call_is_executed_by_an_instance(platform: tuple[RoleApp, str]) -> None:
    methods = ServerlessMethods("judge", Judge, platform[1])
    codec = method_codec(Judge, "score")
    arguments = codec.encode((("a blue sky", "red"),), {})
    assert await methods.call("score", arguments, within_s=10.0) == (1.0, 0.0)
    with pytest.raises(WorkerError, match="ValueError: answers must not be empty") as raised:
        await methods.call("score", codec.encode((("",),), {}), within_s=10.0)
    assert raised.value.failures[0].kind == "ValueError"
    await methods.close()


async def test_a_call_that_nothing_answers_is_a_failure_in_time() -> None:
    methods = ServerlessMethods("judge", Judge, "http://127.0.0.1:9/judge")
    arguments = method_codec(Judge, "score").encode(((),), {})
    with pytest.raises(WorkerError, match=r"gave no result within 0\.2 s") as raised:
        await methods.call("score", arguments, within_s=0.2)
    assert raised.value.failures[0].kind == UNAVAILABLE
    await methods.close()


async def test_a_repeated_request_is_executed_once(platform: tuple[RoleApp, str]) -> None:
    instance, _ = platform
    arguments = method_codec(Judge, "score").encode((("blue",),), {})
    body = encode(CallMethod(call=1, method="score", arguments=arguments))
    first = await instance.answer("a", body)
    assert await instance.answer("a", body) == first
    assert instance._calls._worker.calls == 1  # type: ignore[attr-defined]
    assert (await instance.answer("b", b"\xc1"))[0] == 400


class Meeting(Worker):
    """Notices whether two calls are executed at once."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2)

    @register_serverless()
    def meet(self) -> bool:
        try:
            self.both.wait(0.2)
        except threading.BrokenBarrierError:
            self.both.reset()
            return False
        return True


async def test_an_instance_executes_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if Ray Serve sends another one, as after a client has given up."""
    monkeypatch.setattr("os.chdir", lambda _: None)
    arguments = constructor_codec(Meeting).encode((), {})
    role = DeployedRole(name="m", reference=f"{__name__}:Meeting", arguments=arguments)
    instance, codec = RoleApp(role, b"", b""), method_codec(Meeting, "meet")
    body = encode(CallMethod(call=1, method="meet", arguments=codec.encode((), {})))
    answers = await asyncio.gather(*(instance.answer(key, body) for key in ("a", "b")))
    decoded = [decoder_of(Returned)(answer) for _, answer in answers]
    assert [codec.decode_result(one.value) for one in decoded] == [False, False]


class Both(Worker):
    """Declares too much."""

    @hw_mapping({"default": "H20"})
    @register_serverless()
    def score(self, tag_name: str) -> float:
        return 0.0


def test_wrong_declarations_are_refused() -> None:
    with pytest.raises(ConfigError, match="must not have register_serverless and another"):
        Cluster(Both)
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        register_serverless(timeout_s=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or importlib.util.find_spec("starlette") is None,
    reason="Ray Serve is not installed",
)
def test_ray_serve_executes_the_methods(tmp_path: Path) -> None:
    before = folders()
    with Cluster(Judge, arguments={"word": "blue"}, directory=tmp_path) as judges:
        assert judges.words() == ["blue"]
        assert judges.score(("a blue sky", "red")) == (1.0, 0.0)
        with pytest.raises(WorkerError, match="answers must not be empty"):
            judges.score(("",))
        assert judges.words() == ["blue"], "the workers live on"
    assert folders() <= before, "an instance removes its modules"
