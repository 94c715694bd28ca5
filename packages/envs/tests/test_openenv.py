"""The client of OpenEnv's protocol, against a test server that can fail in every way,
and against OpenEnv's own server.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rollweave.envs.base import Step, new_task
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.schema.errors import ConfigError, EnvError
from rollweave_envs import openenv
from rollweave_envs.openenv import OpenEnv

TASK = new_task(seed=7)
ECHO = {"message": "{text}"}


class Server:
    """Counts and echoes its requests; `fault` is its misbehavior."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.actions, self.open, self.left = fault, [], 0, asyncio.Event()  # type: ignore[var-annotated]
        self.busy = self.tries = 0  # tries that are turned away, and tries so far

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/ws", self.socket)
        app.router.add_post("/reset", self.request)
        app.router.add_post("/step", self.request)
        return app

    def answer(self, what: str, data: dict[str, Any]) -> dict[str, Any]:
        self.actions.append((what, data))
        if what == "reset":
            return {
                "observation": {"text": f"seed {data['seed']}", "count": 0},
                "reward": None,
                "done": False,
            }
        text = data["message"]
        metadata = {"success": text == "end well"} if text != "end" else {}
        observation = {"text": text, "count": len(self.actions), "metadata": metadata}
        return {
            "observation": observation,
            "reward": len(text) / 10,
            "done": text.startswith("end"),
        }

    def refused(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        if "message" not in data:
            return [{"type": "missing", "loc": ["message"], "msg": "Field required"}]
        return (
            [{"type": "string_too_long", "loc": ["message"]}] if len(data["message"]) > 20 else []
        )

    async def socket(self, request: web.Request) -> web.StreamResponse:
        self.tries += 1
        if self.tries <= self.busy:
            return web.Response(status=503, text="starting")
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.open += 1
        try:
            if self.fault == "full":
                await socket.send_json(
                    {
                        "type": "error",
                        "data": {"message": "1 of 1 in use", "code": "CAPACITY_REACHED"},
                    }
                )
                return socket
            async for message in socket:
                command = json.loads(message.data)
                if command["type"] == "close" or not await self.one(socket, command):
                    return socket
        finally:
            await socket.close()
            self.open -= 1
            self.left.set()
        return socket

    async def one(self, socket: web.WebSocketResponse, request: dict[str, Any]) -> bool:
        if self.fault == "hang":
            await asyncio.Event().wait()
        if self.fault == "leave":
            return False
        if self.fault == "bytes":
            await socket.send_bytes(b"{}")
        elif (garbage := GARBAGE.get(self.fault)) is not None:
            await socket.send_str(garbage)
        elif self.fault == "raise":
            await socket.send_json(
                {"type": "error", "data": {"message": "no board", "code": "EXECUTION_ERROR"}}
            )
        elif request["type"] == "step" and (errors := self.refused(request["data"])):
            error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
            await socket.send_json({"type": "error", "data": error})
        else:
            await socket.send_json(
                {"type": "observation", "data": self.answer(request["type"], request["data"])}
            )
        return True

    async def request(self, request: web.Request) -> web.StreamResponse:
        what, data = request.path.removeprefix("/"), await request.json()
        self.tries += 1
        if self.tries <= self.busy:
            return web.Response(status=503, text="starting")
        match self.fault:
            case "hang":
                await asyncio.Event().wait()
            case "leave":
                assert request.transport is not None
                request.transport.abort()
            case "raise":
                return web.Response(status=500, text="no board")
            case "redirect":
                raise web.HTTPFound("/health")
            case "" if what == "step" and (errors := self.refused(data["action"])):
                return web.json_response({"detail": errors}, status=422)
            case "":
                return web.json_response(
                    self.answer(what, data["action"] if what == "step" else data)
                )
        return web.Response(text=HTTP_GARBAGE.get(self.fault, ""))


GARBAGE = {
    "no json": "<html>",
    "no object": "[1]",
    "another type": json.dumps({"type": "state", "data": {}}),
    "no observation": json.dumps({"type": "observation", "data": {"reward": 1.0}}),
    "a text observation": json.dumps({"type": "observation", "data": {"observation": "text"}}),
    "a word as reward": json.dumps(
        {"type": "observation", "data": {"observation": {}, "reward": "much"}}
    ),
    "a number as done": json.dumps({"type": "observation", "data": {"observation": {}, "done": 1}}),
    "nan": '{"type": "observation", "data": {"observation": {}, "reward": NaN}}',
    "deep": "[" * 100_000,
}
HTTP_GARBAGE = {
    "no json": "<html>",
    "no object": "[1]",
    "no observation": '{"reward": 1.0}',
    "a word as reward": '{"observation": {}, "reward": "much"}',
    "nan": '{"observation": {}, "reward": NaN}',
}


@contextlib.asynccontextmanager
async def served(fault: str = "", **options: Any) -> AsyncIterator[tuple[Server, OpenEnv]]:
    server = Server(fault)
    async with listening(
        server.app(), "127.0.0.1", 0, guard=Guard(token=None), shutdown_s=0.1
    ) as url:
        env = OpenEnv(base_url=url + "/", **{"action": ECHO, **options})
        try:
            yield server, env
        finally:
            await env.close()


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "BACK_OFF_S", (0.01, 0.02, 0.04))


both = pytest.mark.parametrize("transport", ["websocket", "http"])


@both
async def test_an_episode(transport: str) -> None:
    async with served(
        transport=transport, observe="{count}: {text}", prompt="Speak. ", reset={"level": 3}
    ) as (server, env):
        first = await env.reset(TASK)
        assert [message.content for message in first.messages] == ["Speak. 0: seed 7"]
        assert await env.step("ab") == Step.of("2: ab", reward=0.2, state_key="2: ab")
        assert await env.step("end") == Step.of("3: end", reward=0.3, done=True)
        assert server.actions == [
            ("reset", {"seed": 7, "level": 3}),
            ("step", {"message": "ab"}),
            ("step", {"message": "end"}),
        ]


@both
async def test_a_server_that_is_busy_is_tried_again(transport: str) -> None:
    async with served(transport=transport) as (server, env):
        server.busy = 3
        assert (await env.reset(TASK)).messages[0].content.startswith('{"text": "seed 7"')
        assert server.tries == 4
        assert (await env.step("ab")).reward == 0.2


@both
async def test_a_server_that_stays_busy_is_given_up(transport: str) -> None:
    async with served(transport=transport) as (server, env):
        server.busy = 100
        with pytest.raises(EnvError, match="503"):
            await env.reset(TASK)
        assert server.tries == 4
        assert env._line._http is None


async def test_a_full_server_is_tried_again_until_it_has_room() -> None:
    async with served("full") as (server, env):
        resetting = asyncio.create_task(env.reset(TASK))
        await asyncio.wait_for(server.left.wait(), 10)
        server.fault = ""
        await resetting


async def test_a_step_is_sent_only_once() -> None:
    async with served(transport="http") as (server, env):
        await env.reset(TASK)
        server.busy = server.tries + 1
        with pytest.raises(EnvError, match="step failed with status 503"):
            await env.step("ab")
        assert server.tries == 2


@both
async def test_success_is_read_from_the_metadata(transport: str) -> None:
    for text, success in (("end well", True), ("end badly", False), ("end", None)):
        async with served(transport=transport) as (_, env):
            await env.reset(TASK)
            assert (await env.step(text)).success is success


async def test_an_observation_without_a_template() -> None:
    assert OpenEnv(base_url="http://x")._written({"text": "alone", "metadata": {"a": 1}}) == "alone"
    assert (
        OpenEnv(base_url="http://x")._written({"text": "é", "count": 3, "metadata": {}})
        == '{"text": "é", "count": 3}'
    )
    assert OpenEnv(base_url="http://x")._written({"count": 3}) == '{"count": 3}'


@both
async def test_the_agent_may_write_the_action_itself(transport: str) -> None:
    async with served(transport=transport, action="json") as (server, env):
        await env.reset(TASK)
        for words in ("hello", "[1]", '{"message": ', "[" * 100_000, '{"text": "other field"}', ""):
            step = await env.step(words)
            assert (step.reward, step.done) == (openenv.INVALID_REWARD, False)
            assert "refused" in step.messages[0].content
        assert (await env.step('{"message": "abc"}')).reward == 0.3
        assert [what for what, _ in server.actions] == ["reset", "step"]


@both
async def test_words_that_the_server_refuses_are_the_agents_doing(transport: str) -> None:
    async with served(transport=transport) as (_, env):
        await env.reset(TASK)
        step = await env.step("x" * 21)
        assert step.reward == openenv.INVALID_REWARD
        assert "string_too_long" in step.messages[0].content
        assert (await env.step("ok")).reward == 0.2


@both
async def test_a_template_that_the_server_refuses_is_not(transport: str) -> None:
    async with served(transport=transport, action={"text": "{text}"}) as (_, env):
        await env.reset(TASK)
        with pytest.raises(
            EnvError,
            match=r"options\.action must suit the server's action.*missing",
        ):
            await env.step("ok")
        with pytest.raises(EnvError, match="the session is closed"):
            await env.step("ok")


def test_words_in_a_template_stay_words() -> None:
    env = OpenEnv(
        base_url="http://x", action={"a": ["{text}!", 3], "b": {"c": "{text} {text}"}}
    )._action_of('"}{text}')
    assert env == {"a": ['"}{text}!', 3], "b": {"c": '"}{text} "}{text}'}}


WS_FAULTS = {
    "raise": "reset: EXECUTION_ERROR: no board",
    "full": "CAPACITY_REACHED: 1 of 1 in use",
    "leave": "closed the session during reset",
    "bytes": r"closed the session during reset \(BINARY",
    "no json": "what is no JSON.*<html>",
    "no object": r"must be answered with a JSON object, got \[1\]",
    "another type": "must be answered with type observation.*state",
    "no observation": "another shape.*missing required field `observation`",
    "a text observation": r"another shape.*`\$.observation`",
    "a word as reward": r"another shape.*`\$.reward`",
    "a number as done": r"another shape.*`\$.done`",
    "nan": "JSON has no NaN",
    "deep": "what is no JSON",
}


@pytest.mark.parametrize("fault", sorted(WS_FAULTS))
async def test_a_faulty_session(fault: str) -> None:
    async with served(fault) as (server, env):
        with pytest.raises(EnvError, match=WS_FAULTS[fault]):
            await env.reset(TASK)
        await asyncio.wait_for(server.left.wait(), 10)
        assert server.open == 0
        assert env._line._http is None


HTTP_FAULTS = {
    "raise": "reset failed with status 500: no board",
    "redirect": "reset failed with status 302",
    "leave": "reset failed: ServerDisconnectedError",
    "no json": "what is no JSON.*<html>",
    "no object": r"must be answered with a JSON object, got \[1\]",
    "no observation": "another shape.*missing required field `observation`",
    "a word as reward": r"another shape.*`\$.reward`",
    "nan": "JSON has no NaN",
}


@pytest.mark.parametrize("fault", sorted(HTTP_FAULTS))
async def test_a_faulty_server(fault: str) -> None:
    async with served(fault, transport="http") as (_, env):
        with pytest.raises(EnvError, match=HTTP_FAULTS[fault]):
            await env.reset(TASK)
        assert env._line._http is None


@both
async def test_a_server_that_hangs(transport: str) -> None:
    async with served("hang", transport=transport, timeout_s=0.2) as (_, env):
        with pytest.raises(
            EnvError,
            match=r"did not answer reset within options.timeout_s = 0.2 s",
        ):
            await env.reset(TASK)
        assert env._line._http is None


@both
async def test_a_caller_that_gives_up_leaves_no_session(transport: str) -> None:
    async with served("hang", transport=transport) as (_, env):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.reset(TASK), 0.2)
        assert env._line._http is None


@both
async def test_no_server(transport: str, unused_tcp_port: int) -> None:
    env = OpenEnv(base_url=f"http://127.0.0.1:{unused_tcp_port}", transport=transport)  # type: ignore[arg-type]
    with pytest.raises(EnvError, match=r"reset failed: Client.*Error"):
        await env.reset(TASK)
    await env.close()


async def test_the_session_is_closed_at_the_end() -> None:
    async with served() as (server, env):
        await env.reset(TASK)
        assert server.open == 1
        await env.close()
        await asyncio.wait_for(server.left.wait(), 10)
        assert server.open == 0


async def test_an_observation_without_the_named_field() -> None:
    async with served(observe="{board}") as (_, env):
        with pytest.raises(
            EnvError,
            match=r"must name fields of the observation \(text, count\), got 'board'",
        ):
            await env.reset(TASK)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"base_url": "localhost:8000"}, r"options\.base_url must be http\(s\)://host"),
        (
            {"action": {"message": "hello"}},
            r"options\.action must be 'json', or an object with '\{text\}'",
        ),
        ({"action": "text"}, r"options\.action must be 'json'.*got 'text'"),
        ({"transport": "grpc"}, r"options\.transport must be websocket or http, got 'grpc'"),
        ({"timeout_s": 0}, r"options\.timeout_s must be positive"),
    ],
)
def test_refuses_invalid_options(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        OpenEnv(**{"base_url": "http://x", **options})


REAL = """
import socket, sys, uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    number: int

class Heard(Observation):
    text: str

class World(Environment[Say, Heard, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.sum = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.sum = seed
        return Heard(text=f"sum {self.sum}")

    def step(self, action, **kwargs):
        if action.number == 13:
            raise RuntimeError("unlucky")
        self.sum += action.number
        return Heard(text=f"sum {self.sum}", reward=action.number / 2, done=self.sum > 20)

    @property
    def state(self):
        return State(step_count=0)

listener = socket.socket()
listener.bind(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
app = create_fastapi_app(World, Say, Heard, max_concurrent_envs=4)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
"""
PYTHON = os.environ.get("OPENENV_PYTHON", sys.executable)
"""An interpreter with openenv, which has many dependencies, so a separate virtual
environment is best.
"""


@pytest.fixture
def real(tmp_path: Path) -> Any:
    if subprocess.run(
        [PYTHON, "-c", "import openenv"], capture_output=True, check=False
    ).returncode:
        pytest.skip(f"{PYTHON} has no openenv (pip install openenv)")
    (tmp_path / "server.py").write_text(REAL)
    with subprocess.Popen(
        [PYTHON, str(tmp_path / "server.py")], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


async def healthy(url: str) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{url}/health") as answer:
                    assert await answer.json() == {"status": "healthy"}
                    return
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_openenvs_own_server(real: str) -> None:
    await healthy(real)
    envs = [OpenEnv(base_url=real, action={"number": "{text}"}) for _ in range(4)]
    for seed, env in enumerate(envs):
        assert (await env.reset(new_task(seed=seed))).messages[0].content == f"sum {seed}"
    for seed, env in enumerate(envs):  # each session has its own environment
        assert await env.step(" 4 ") == Step.of(
            f"sum {seed + 4}", reward=2.0, state_key=f"sum {seed + 4}"
        )
    refused = await envs[0].step("four")
    assert refused.reward == openenv.INVALID_REWARD
    assert "int_parsing" in refused.messages[0].content
    assert await envs[0].step("17") == Step.of("sum 21", reward=8.5, done=True)
    fifth = OpenEnv(base_url=real, action={"number": "{text}"})
    with pytest.raises(EnvError, match="CAPACITY_REACHED"):
        await fifth.reset(TASK)
    with pytest.raises(EnvError, match="EXECUTION_ERROR: unlucky"):
        await envs[1].step("13")
    # in the place of the one that failed
    wrong = OpenEnv(base_url=real, action={"value": "{text}"})
    await wrong.reset(TASK)
    with pytest.raises(EnvError, match=r"options\.action must suit"):
        await wrong.step("1")
    once = OpenEnv(base_url=real, action={"number": "{text}"}, transport="http")
    assert (await once.reset(TASK)).messages[0].content == "sum 7"
    # a new environment for every request
    assert (await once.step("2")).messages[0].content == "sum 2"
    assert (await once.step("two")).reward == openenv.INVALID_REWARD
    for env in (*envs, once):
        await env.close()
