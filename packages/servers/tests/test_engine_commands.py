"""What an engine with a server makes of the commands of its loop, on a server, a client
and controls that record what they are asked. Engines with whole servers are in
`vllm` and `sglang`.
"""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rollweave.schema import serving as s
from rollweave.schema.base import EngineId
from rollweave.schema.errors import EngineError, EngineLostError, WeightsError
from rollweave.schema.weights import WeightManifest
from rollweave_servers import engine as module
from rollweave_servers.control import ControlError, RefusedError
from rollweave_servers.engine import MAX_REQUESTS, ServerEngine
from rollweave_servers.vllm_kv import KvError

SHAPE: Any = SimpleNamespace(vocab=128, context=300)


def manifest(version: int) -> WeightManifest:
    return WeightManifest(
        version=version,
        publication_id=10 + version,
        location="",
        tensors=(),
        nbytes=0,
        digest="",
    )


def request(id: str = "r", rank: float = 0.0) -> s.GenerateRequest:
    return s.GenerateRequest(id=id, tokens=(1, 2), sampling=s.Sampling(max_tokens=4), rank=rank)


class Held:
    """Weights that are held, until they are closed for the only time."""

    def __init__(self, kept: WeightManifest) -> None:
        self.manifest, self.closed = kept, 0

    def close(self) -> None:
        self.closed += 1


class World:
    """The kind of the engine, its server, its client, its control and its mover, which
    note their calls in `calls`. A method in `fails` raises that error, and one in
    `gates` waits.
    """

    name, dialect = "vLLM", "vllm"
    url, token = "http://127.0.0.1:9", "secret"

    def __init__(self, *, preempts: bool = False, moves_kv: bool = False) -> None:
        self.preempts, self.moves_kv = preempts, moves_kv
        self.calls, self.replies = list[Any](), list[s.EngineReply]()
        self.commands = asyncio.Queue[s.EngineCommand]()
        self.held, self.answers = list[Held](), dict[str, asyncio.Future[s.GenerateResult]]()
        self.on_tokens, self.report_s = dict[str, Any](), dict[str, float]()
        self.fails, self.gates = dict[str, Exception](), dict[str, asyncio.Event]()
        self.gauge = dict[str, float]()
        self.taken = list[bool]()
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.publication_id = -1
        self.paused = False
        self.client: dict[str, Any] = {}

    async def note(self, name: str, *arguments: object) -> None:
        self.calls.append((name, *arguments) if arguments else name)
        if name in self.gates:
            await self.gates[name].wait()
        if name in self.fails:
            raise self.fails[name]

    # The kind

    def version(self, python: str, *, routes: bool = False, moves_kv: bool = False) -> str:
        self.calls.append(("version", python, routes, moves_kv))
        return "1"

    async def start(self, spec: s.EngineSpec, shape: object, folder: Path) -> Any:
        self.folder = folder
        await self.note("start")
        return self

    def speak(self, spec: s.EngineSpec, shape: object) -> Any:
        assert shape is SHAPE
        changed = lambda *versions: self.calls.append(("dialect", *versions))  # noqa: E731
        return SimpleNamespace(changed=changed)

    def control(self, spec: s.EngineSpec, server: object) -> Any:
        assert server is self
        return Control(self)

    def mover(self, spec: s.EngineSpec, shape: object, server: object) -> Any:
        assert (shape, server) == (SHAPE, self)
        return Mover(self) if self.moves_kv else None

    def hold(self, spec: s.EngineSpec, kept: WeightManifest, shape: object, folder: Path) -> Held:
        assert (shape, folder) == (SHAPE, self.folder)
        self.calls.append(("hold", kept.version))
        if "hold" in self.fails:
            raise self.fails["hold"]
        self.held.append(Held(kept))
        return self.held[-1]

    # The server

    def on_ready(self) -> None:
        self.calls.append("on_ready")

    async def ended(self) -> str:
        return await asyncio.shield(self.end)

    def kill(self) -> None:
        self.calls.append("kill")
        if not self.end.done():
            self.end.set_result("it was killed")

    # What a test sees

    async def reply(self, kind: Any, count: int = 1) -> Any:
        """Return the reply of this kind number `count`, once there is one."""

        def found() -> list[Any]:
            return [reply for reply in self.replies if isinstance(reply, kind)]

        await until(lambda: len(found()) >= count)
        return found()[count - 1]

    async def called(self, call: object, count: int = 1) -> None:
        """Wait until this call has been made so often."""
        await until(lambda: self.calls.count(call) >= count)

    async def send(self, *commands: s.EngineCommand) -> None:
        """Have the engine take these commands."""
        for command in commands:
            self.commands.put_nowait(command)
        await until(self.commands.empty)
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Let the engine work until the condition holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (the engine reports to lists)
            await asyncio.sleep(0.001)


class Control:
    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> None:
            given = [a.manifest.version if isinstance(a, Held) else a for a in arguments]
            assert not any(isinstance(a, Held) and a.closed for a in arguments)
            await self._world.note(name, *given)

        return call

    async def gauges(self) -> dict[str, float]:
        await self._world.note("gauges")
        return self._world.gauge

    async def rerank(self, id: str, priority: int) -> bool:
        await self._world.note("rerank", id, priority)
        return self._world.taken.pop(0) if self._world.taken else True


class Mover:
    def __init__(self, world: World) -> None:
        self._world = world

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "publication_id":
            self._world.calls.append(("mover of", value))
        object.__setattr__(self, name, value)

    async def pause(self) -> None:
        await self._world.note("mover pauses")

    def resume(self) -> None:
        self._world.calls.append("mover resumes")

    def release(self, id: str) -> None:
        self._world.calls.append(("release", id))

    async def export(self, id: str, tokens: object) -> Any:
        raise KvError(f"no KV of {id}")

    async def close(self) -> None:
        await self._world.note("mover closes")


class Client:
    """The part of `HttpEngine` that an engine uses."""

    world: World

    def __init__(self, spec: Any, **options: Any) -> None:
        self.world.client = {"spec": spec, **options}
        self.lost = self.world.lost

    async def ready(self) -> None:
        await self.world.note("http ready")

    def generate(self, request: s.GenerateRequest, on_tokens: Any, *, report_s: float) -> Any:
        self.world.report_s[request.id] = report_s
        self.world.calls.append(("generate", request.id, request.rank))
        self.world.on_tokens[request.id] = on_tokens
        answer: asyncio.Future[s.GenerateResult] = asyncio.get_running_loop().create_future()
        self.world.answers[request.id] = answer
        return answer

    def abort(self, id: str) -> None:
        self.world.calls.append(("abort", id))

    def wire_id(self, id: str) -> str | None:
        return f"wire-{id}" if id in self.world.answers else None

    async def stats(self) -> s.EngineStats:
        await self.world.note("http stats")
        return s.EngineStats(
            version=77, running=3, waiting=4, kv_used_tokens=5, kv_total_tokens=1000, steps=6
        )

    async def close(self) -> None:
        await self.world.note("http closes")
        for answer in self.world.answers.values():
            answer.cancel()


def spec_of(**server: Any) -> s.EngineSpec:
    settings: dict[str, Any] = {"kind": "vllm", "python": "python3", "start_s": 7.0}
    return s.EngineSpec(
        id=EngineId("e0"),
        model="m",
        version=4,
        max_slots=8,
        kv_tokens=200,
        server=s.ServerSpec(**settings | {"control_s": 5.0} | server),
    )


@contextlib.asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, world: World, spec: s.EngineSpec | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """Run an engine, and end it by `Shutdown` if it has not ended."""

    @contextmanager
    def publishing(*_: object) -> Iterator[Any]:
        yield SimpleNamespace(manifest=manifest(0))

    monkeypatch.setattr(module, "read_any_shape", lambda path: SHAPE)
    monkeypatch.setattr(module, "HttpEngine", type("Own", (Client,), {"world": world}))
    monkeypatch.setattr(module, "published_model", publishing)
    engine = ServerEngine(world, spec or spec_of(), world.replies.append)  # type: ignore[arg-type]
    before = asyncio.all_tasks()
    task = asyncio.create_task(engine.run(world.commands))
    try:
        yield task
    finally:
        world.commands.put_nowait(s.Shutdown())
        async with asyncio.timeout(10):
            await task
        assert "kill" in world.calls or "start" in world.fails
        assert asyncio.all_tasks() == before, "no task may remain"
        assert all(held.closed == 1 for held in world.held)
        assert not world.folder.exists()


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture
async def pair() -> World:
    """The world of an engine whose server preempts, and whose KV is moved."""
    return World(preempts=True, moves_kv=True)


@pytest.mark.parametrize("extras", [False, True])
async def test_an_engine_starts_and_ends_with_its_server(
    monkeypatch: pytest.MonkeyPatch, extras: bool
) -> None:
    world = World(preempts=extras, moves_kv=extras)
    spec = spec_of(moves_kv=extras)
    async with running(monkeypatch, world, spec):
        ready = await world.reply(s.Ready)
        assert ready == s.Ready(
            version=4,
            kv_total_tokens=200,
            max_slots=8,
            max_context=200,
            stages=True,
            moves_kv=extras,
            preempts=extras,
        )
        client = world.client["spec"]
        assert (client.name, client.url, client.token) == ("vLLM", world.url, "secret")
        assert (client.vocab, client.dialect, client.kv_tokens) == (128, "vllm", 200)
        assert client.slots == (MAX_REQUESTS if extras else 8)
        assert (world.client["start_s"], world.client["leased"]) == (7.0, False)
    assert world.calls == [
        ("version", "python3", False, extras),
        *("start", "http ready", "on_ready", "connect", "http closes", "close"),
        *(["mover closes"] if extras else []),
        "kill",
    ]
    assert len(world.replies) == 1


@pytest.mark.parametrize(("version", "label"), [(4, "4"), (-1, "0")])
async def test_a_leased_server_gets_the_models_weights_before_it_serves(
    monkeypatch: pytest.MonkeyPatch, world: World, version: int, label: str
) -> None:
    spec = spec_of(addresses=("http://127.0.0.1:9",))
    async with running(monkeypatch, world, msgspec.structs.replace(spec, version=version)):
        await world.reply(s.Ready)
        assert world.client["leased"]
    restored = ["connect", ("reset", label), ("hold", 0), ("check", 0), ("swap", 0, label)]
    assert world.calls[:8] == ["start", *restored, "resume", "http ready"]


@pytest.mark.parametrize("step", ["connect", "reset", "hold", "check", "swap", "resume"])
async def test_a_leased_server_that_cannot_be_restored_ends_its_engine(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    world = World(moves_kv=True)
    monkeypatch.setattr(module, "END_S", 0.0)
    world.fails[step] = WeightsError("a tensor") if step == "hold" else ControlError("no answer")
    async with running(monkeypatch, world, spec_of(addresses=("http://127.0.0.1:9",))):
        fatal = await world.reply(s.EngineFatal)
    error = "vLLM cannot have the model's weights: a tensor" if step == "hold" else "no answer"
    assert fatal.error == error
    assert world.calls[-3:] == ["close", "mover closes", "kill"]
    assert "http ready" not in world.calls


@pytest.mark.parametrize("server", [{"args": ("--x",)}, {"python": "/opt/python"}])
async def test_the_users_options_are_refused_where_user_code_is(
    monkeypatch: pytest.MonkeyPatch, world: World, server: dict[str, Any]
) -> None:
    monkeypatch.setattr(module, "user_code_is_allowed", lambda: False)
    engine = ServerEngine(world, spec_of(**server), world.replies.append)  # type: ignore[arg-type]
    await engine.run(world.commands)
    (fatal,) = world.replies
    assert isinstance(fatal, s.EngineFatal)
    assert fatal.error.startswith("the server's interpreter and options ")
    assert not world.calls


async def test_a_server_that_does_not_start_is_reported(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    world.fails["start"] = EngineError("no such model")
    async with running(monkeypatch, world):
        assert (await world.reply(s.EngineFatal)).error == "no such model"


@pytest.mark.parametrize("how", ["end", "lost", "control"])
async def test_the_end_of_the_server_is_the_reason_of_every_loss(
    monkeypatch: pytest.MonkeyPatch, world: World, how: str
) -> None:
    """The client and the controls may notice a loss before the process has ended."""
    async with running(monkeypatch, world) as task:
        await world.reply(s.Ready)
        loop = asyncio.get_running_loop()
        if how == "lost":
            world.lost.set_result("vLLM is silent")
        elif how == "control":
            world.fails["pause"] = ControlError("vLLM's answer broke off")
            world.commands.put_nowait(s.Suspend())
            await world.called("pause")
        loop.call_soon(world.end.set_result, "OutOfMemoryError: all of it")
        await asyncio.wait([task])
    assert world.replies[1:] == [s.EngineFatal(error="OutOfMemoryError: all of it")]


@pytest.mark.parametrize("how", ["lost", "release", "control"])
async def test_a_server_that_still_runs_is_ended_with_the_reason_of_its_loss(
    monkeypatch: pytest.MonkeyPatch, world: World, how: str
) -> None:
    monkeypatch.setattr(module, "END_S", 0.0)
    world.fails["pause"] = ControlError("vLLM's answer broke off")
    async with running(monkeypatch, world) as task:
        await world.reply(s.Ready)
        if how == "lost":
            world.lost.set_result("vLLM is silent")
        else:
            world.commands.put_nowait(s.Suspend(release=how == "release"))
        await asyncio.wait([task])
    errors = {
        "lost": "vLLM is silent",
        "release": "vLLM cannot give back its memory",
        "control": "vLLM's answer broke off",
    }
    assert world.replies[1:] == [s.EngineFatal(error=errors[how])]
    assert world.calls[-3:] == ["http closes", "close", "kill"]


# Requests


async def test_requests_wait_while_the_server_is_paused(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    async with running(monkeypatch, world):
        await world.reply(s.Ready)
        await world.send(s.Resume(), s.Add(request=request("a")), s.Suspend(), s.Suspend())
        assert (await world.reply(s.Suspended)).in_flight == 1
        assert (await world.reply(s.Suspended, 2)).in_flight == 1
        assert world.calls.count("pause") == 1, "it stands still already"
        assert "resume" not in world.calls, "it stood still never"
        await world.send(*(s.Add(request=request(id, rank=1.0)) for id in "bcd"))
        await world.send(s.Abort(id="c"), s.Rerank(id="d", rank=5.0), s.Suspend())
        await world.send(s.Rerank(id="b", rank=math.inf), s.Stats())
        assert (await world.reply(s.Suspended, 3)).in_flight == 3
        assert (await world.reply(s.Sampled)).stats.waiting == 4 + 2
        (aborted,) = [each.result for each in world.replies if isinstance(each, s.Generated)]
        assert (aborted.id, aborted.finish) == ("c", s.FinishReason.ABORTED)
        assert [call for call in world.calls if call[0] == "generate"] == [("generate", "a", 0.0)]
        await world.send(s.Resume(), s.Resume())
        await world.called(("generate", "d", 5.0))
        generated = [call for call in world.calls if call[0] == "generate"]
        assert generated == [("generate", "a", 0.0), ("generate", "b", 1.0), ("generate", "d", 5.0)]
        assert world.calls.count("resume") == 1
        assert ("abort", "c") not in world.calls
        await world.send(s.Abort(id="a"), s.Stats())
        assert ("abort", "a") in world.calls
        assert (await world.reply(s.Sampled, 2)).stats.waiting == 4
        await world.send(s.Suspend(), s.Resume(), s.Suspend())
        assert (await world.reply(s.Suspended, 5)).in_flight == 3
        assert world.calls.count(("generate", "b", 1.0)) == 1, "it is sent once"


async def test_every_answer_is_reported_and_nothing_of_it_is_kept(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    async with running(monkeypatch, world):
        await world.reply(s.Ready)
        for id in ("good", "wrong", "lost", "gone"):
            await world.send(s.Add(request=request(id), report_s=s.STREAM_S))
        good = s.GenerateResult.empty("good", s.FinishReason.LENGTH)
        world.answers["good"].set_result(good)
        world.answers["wrong"].set_exception(EngineError("status 500"))
        world.answers["lost"].set_exception(EngineLostError("vLLM is silent"))
        world.answers["gone"].cancel()
        await world.send(s.Suspend())
        assert (await world.reply(s.Suspended)).in_flight == 1, (
            "the lost one ends with the engine, which reports its tokens"
        )
        bad = s.GenerateResult.empty("wrong", s.FinishReason.ERROR, "status 500")
        generated = [each.result for each in world.replies if isinstance(each, s.Generated)]
        assert generated == [good, bad]


def delta(id: str, start: int) -> s.TokenDelta:
    span = s.VersionSpan(start=start, end=start + 1, version=4)
    return s.TokenDelta(id=id, start=start, tokens=(start,), logprobs=(-1.0,), versions=(span,))


async def test_tokens_are_reported_as_late_as_a_request_allows(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    async with running(monkeypatch, world):
        await world.reply(s.Ready)
        reports = {"read": s.STREAM_S, "kept": 2 * s.STREAM_S, "whole": None, "late": 0.0}
        for id, report_s in reports.items():
            await world.send(s.Add(request=request(id), report_s=report_s))
        wanted = {id for id, on_tokens in world.on_tokens.items() if on_tokens is not None}
        assert wanted == {"read", "kept", "late"}
        assert {id: world.report_s[id] for id in wanted} == {id: reports[id] for id in wanted}
        world.on_tokens["read"](delta("read", 0))
        await world.send(s.Suspend())
        await world.reply(s.Suspended)
        kinds = [type(reply) for reply in world.replies]
        assert kinds.index(s.Progress) < kinds.index(s.Suspended), "no token is kept back"
        await world.send(s.Resume())
        world.on_tokens["read"](delta("read", 1))
        world.answers["read"].set_result(s.GenerateResult.empty("read", s.FinishReason.STOP))
        await world.reply(s.Generated)
        await world.send(s.Suspend())
        await world.reply(s.Suspended, 2)
        (progress,) = [each for each in world.replies if isinstance(each, s.Progress)]
        assert progress.pieces == (delta("read", 0),), "the result has the rest"
        # an id may return, and nobody takes its next tokens
        await world.send(s.Resume(), s.Add(request=request("read")))
        await world.called("resume", 2)
        assert world.on_tokens["read"] is None


async def test_the_newest_rank_is_sent_until_the_server_has_it(
    monkeypatch: pytest.MonkeyPatch, pair: World
) -> None:
    monkeypatch.setattr(module, "RANK_PAUSE_S", 0.0)
    async with running(monkeypatch, pair):
        await pair.reply(s.Ready)
        await pair.send(s.Add(request=request("a")), s.Add(request=request("b")))
        gate = pair.gates["rerank"] = asyncio.Event()
        pair.taken = [False, True, True]
        await pair.send(s.Rerank(id="a", rank=1.5), s.Rerank(id="x", rank=1.0))
        await pair.called(("rerank", "wire-a", -1500))
        await pair.send(s.Rerank(id="a", rank=-2.0), s.Rerank(id="a", rank=math.nan))
        gate.set()
        await pair.called(("rerank", "wire-a", 2000))
        await pair.send(s.Rerank(id="b", rank=3.0))
        await pair.called(("rerank", "wire-b", -3000))
        await pair.send(s.Rerank(id="a", rank=4.0))
        await pair.called(("rerank", "wire-a", -4000))
        ranks = [call[1:] for call in pair.calls if call[0] == "rerank"]
        assert ranks == [
            *(("wire-a", -1500), ("wire-a", 2000), ("wire-b", -3000), ("wire-a", -4000))
        ]


async def test_a_rank_that_is_taken_too_late_is_sent_again(
    monkeypatch: pytest.MonkeyPatch, pair: World
) -> None:
    async with running(monkeypatch, pair):
        await pair.reply(s.Ready)
        await pair.send(s.Add(request=request("a")))
        gate = pair.gates["rerank"] = asyncio.Event()
        await pair.send(s.Rerank(id="a", rank=1.0), s.Rerank(id="a", rank=2.0))
        await pair.send(s.Rerank(id="a", rank=3.0))
        gate.set()
        await pair.called(("rerank", "wire-a", -3000))
        await pair.send(s.Stats())
        await pair.reply(s.Sampled)
        assert len([call for call in pair.calls if call[0] == "rerank"]) <= 2


async def test_no_rank_is_sent_for_a_request_that_is_over(
    monkeypatch: pytest.MonkeyPatch, pair: World
) -> None:
    monkeypatch.setattr(module, "RANK_PAUSE_S", 0.0)
    async with running(monkeypatch, pair):
        await pair.reply(s.Ready)
        await pair.send(s.Add(request=request("a")))
        gate, pair.taken = asyncio.Event(), [False] * 99
        pair.gates["rerank"] = gate
        await pair.send(s.Rerank(id="a", rank=1.0))
        await pair.called(("rerank", "wire-a", -1000))
        pair.answers["a"].set_result(s.GenerateResult.empty("a", s.FinishReason.STOP))
        await pair.reply(s.Generated)
        gate.set()
        await pair.send(s.Rerank(id="a", rank=2.0), s.Stats())
        await pair.reply(s.Sampled)
        assert [call for call in pair.calls if call[0] == "rerank"] == [("rerank", "wire-a", -1000)]


async def test_a_server_that_does_not_preempt_gets_no_ranks(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    async with running(monkeypatch, world):
        await world.reply(s.Ready)
        await world.send(s.Add(request=request("a")), s.Rerank(id="a", rank=1.0), s.Stats())
        await world.reply(s.Sampled)
        assert not [call for call in world.calls if call[0] == "rerank"]


# State


@pytest.mark.parametrize(
    ("gauge", "expected"),
    [
        ({}, (3, 4, 0, 0)),
        ({"running": 9.0, "waiting": 8.0, "kv_share": 0.2504, "preemptions": 7.0}, (9, 8, 250, 7)),
    ],
)
async def test_the_state_is_that_of_the_server_if_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    gauge: dict[str, float],
    expected: tuple[int, int, int, int],
) -> None:
    world.gauge = gauge
    async with running(monkeypatch, world):
        await world.send(s.Stats())
        stats = (await world.reply(s.Sampled)).stats
    found = (stats.running, stats.waiting, stats.kv_used_tokens, stats.preemptions)
    assert found == expected
    assert (stats.version, stats.kv_total_tokens, stats.steps) == (4, 1000, 6)


async def test_a_heartbeat_says_for_how_long_the_server_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    loop = asyncio.get_running_loop()
    clock, late = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: clock() + late)
    async with running(monkeypatch, world):
        await world.reply(s.Ready)
        gate = world.gates["gauges"] = asyncio.Event()
        await world.send(s.Beat())
        late = 1000.0
        await world.send(s.Beat(), s.Beat())
        beats = [each for each in world.replies if isinstance(each, s.Beating)]
        assert {each.doing for each in beats} == {"a request for the server's metrics"}
        assert [each.for_s for each in beats] == pytest.approx([0.0, late, late], abs=100.0)
        assert world.calls.count("gauges") == 1, "one request at a time"
        gate.set()
        await world.send(s.Stats())
        await world.reply(s.Sampled)
        await world.send(s.Beat())
        assert (await world.reply(s.Beating, 4)).for_s < 100.0
        await world.called("gauges", 3)


async def test_what_is_under_way_ends_with_the_engine(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    world.gates["gauges"] = world.gates["pause"] = asyncio.Event()
    async with running(monkeypatch, world):
        await world.send(s.Beat(), s.Stats(), s.Suspend(), s.Add(request=request()))
        await world.called("gauges", 2)
        await world.called("pause")


async def test_the_first_of_several_failures_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    monkeypatch.setattr(module, "END_S", 0.0)
    unhandled = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unhandled.append(what))
    gate = world.gates["gauges"] = asyncio.Event()
    world.fails["gauges"] = ControlError("vLLM's answer broke off")
    async with running(monkeypatch, world) as task:
        await world.send(s.Beat(), s.Stats())
        await world.called("gauges", 2)
        gate.set()
        await asyncio.wait([task])
    assert (await world.reply(s.EngineFatal)).error == "vLLM's answer broke off"
    assert not unhandled


async def test_kv_is_moved_by_the_mover_alone(
    monkeypatch: pytest.MonkeyPatch, world: World, pair: World
) -> None:
    export = s.ExportKv(id="k", tokens=(1,), over="shm")
    releases = s.ReleaseKv(id="k"), s.ReleaseKv(id="l", abandoned=True)
    for each, error in ((pair, "no KV of k"), (world, "vLLM's KV cannot be moved from here")):
        async with running(monkeypatch, each):
            await each.send(export, *releases)
            assert await each.reply(s.KvRefused) == s.KvRefused(id="k", error=error)
    assert [call for call in pair.calls if call[0] == "release"] == [("release", "k")]


# Weights


def swapped(version: int, *, moves_kv: bool = False) -> list[Any]:
    return [
        ("check", version),
        ("dialect", version, 10 + version),
        *([("mover of", 10 + version)] if moves_kv else []),
        ("swap", version, str(version)),
    ]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("suspended", [False, True])
async def test_a_version_is_swapped_into_a_paused_server(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    staged: bool,
    suspended: bool,
) -> None:
    world = World(moves_kv=True)
    async with running(monkeypatch, world):
        await world.reply(s.Ready)
        start = len(world.calls)
        if staged:
            await world.send(s.Stage(manifest=manifest(5)))
            assert await world.reply(s.Staged) == s.Staged(version=5, publication_id=15)
        if suspended:
            await world.send(s.Suspend())
            await world.reply(s.Suspended)
        await world.send(s.Load(manifest=manifest(5)))
        loaded = await world.reply(s.Loaded)
        assert (loaded.version, loaded.recompute_tokens) == (5, 0)
        assert 0 <= loaded.load_s < 20
        if suspended:
            await world.send(s.Resume())
        await world.called("mover resumes")
        pause = ["mover pauses", "pause"]
        hold = [("hold", 5)]
        before = [*pause, *hold] if suspended and not staged else [*hold, *pause]
        calls = [*before, *swapped(5, moves_kv=True), "resume", "mover resumes"]
        assert world.calls[start:] == calls
        await world.send(s.Stats())
        assert (await world.reply(s.Sampled)).stats.version == 5
        await world.send(s.Suspend(), s.Resume())
        await world.called("mover resumes", 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("weights v5 updated: bring "), "each update has one line"
    assert all(float(value) < 20 for value in re.findall(r" ([0-9.]+) s", line))


@pytest.mark.parametrize("suspended", [False, True])
async def test_a_version_that_the_server_refuses_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    world: World,
    suspended: bool,
) -> None:
    async with running(monkeypatch, world):
        await world.reply(s.Ready)
        await world.send(s.Load(manifest=manifest(5)))
        await world.reply(s.Loaded)
        if suspended:
            await world.send(s.Suspend())
            await world.reply(s.Suspended)
        start = len(world.calls)
        world.fails["check"] = RefusedError("a shape is wrong")
        await world.send(s.Load(manifest=manifest(6)))
        failed = await world.reply(s.LoadFailed)
        assert failed == s.LoadFailed(version=6, error="weights version 6: a shape is wrong")
        between = [] if suspended else ["pause"]
        after = [] if suspended else ["resume"]
        expected = [("hold", 6), *between, ("check", 6), ("give_up", "5"), *after]
        assert world.calls[start:] == expected
        del world.fails["check"]
        await world.send(s.Stats())
        assert (await world.reply(s.Sampled)).stats.version == 5
        await world.send(s.Load(manifest=manifest(7)))
        assert (await world.reply(s.Loaded, 2)).version == 7
        if suspended:
            await world.send(s.Resume())
            await world.called("resume", 2)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["v5", "v7"]


async def test_the_first_version_that_is_refused_leaves_the_label_of_the_models_weights(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    world.fails["check"] = RefusedError("no")
    async with running(monkeypatch, world):
        await world.send(s.Load(manifest=manifest(5)))
        await world.reply(s.LoadFailed)
    assert ("give_up", "default") in world.calls


@pytest.mark.parametrize("loads", [5, 6])
async def test_only_the_staged_version_is_used_and_each_is_given_up(
    monkeypatch: pytest.MonkeyPatch, world: World, loads: int
) -> None:
    async with running(monkeypatch, world):
        await world.send(s.Stage(manifest=manifest(4)), s.Stage(manifest=manifest(5)))
        await world.reply(s.Staged, 2)
        assert [held.closed for held in world.held] == [1, 0]
        await world.send(s.Load(manifest=manifest(loads)))
        await world.reply(s.Loaded)
        assert [held.closed for held in world.held] == [1] * len(world.held)
        holds = [call[1] for call in world.calls if call[0] == "hold"]
        assert holds == ([4, 5] if loads == 5 else [4, 5, 6])
        await world.send(s.Load(manifest=manifest(loads)))
        await world.reply(s.Loaded, 2)
        assert len(world.held) == len(holds) + 1, "a version is used once"


@pytest.mark.parametrize("stages", [True, False])
async def test_a_version_that_cannot_be_read_is_reported(
    monkeypatch: pytest.MonkeyPatch, world: World, stages: bool
) -> None:
    world.fails["hold"] = WeightsError("the digest is wrong")
    async with running(monkeypatch, world):
        await world.reply(s.Ready)
        start = len(world.calls)
        if stages:
            await world.send(s.Stage(manifest=manifest(5)))
            failed: Any = s.StageFailed(version=5, publication_id=15, error="the digest is wrong")
        else:
            await world.send(s.Load(manifest=manifest(5)))
            failed = s.LoadFailed(version=5, error="the digest is wrong")
        assert await world.reply(type(failed)) == failed
        assert world.calls[start:] == [("hold", 5)]


@pytest.mark.parametrize("error", [None, WeightsError("no"), OSError("no"), ValueError("no")])
async def test_the_checkpoint_of_a_trainer_is_loaded_and_given_up(
    monkeypatch: pytest.MonkeyPatch, world: World, error: Exception | None
) -> None:
    @contextmanager
    def read(command: s.LoadCheckpoint) -> Iterator[Any]:
        assert command.directory == "checkpoints/6"
        if error is not None:
            raise error
        yield SimpleNamespace(manifest=manifest(command.version))

    monkeypatch.setattr(module, "published", read)
    command = s.LoadCheckpoint(
        version=6, publication_id=16, directory="checkpoints/6", dtype="float32"
    )
    async with running(monkeypatch, world):
        await world.send(command)
        if error is None:
            assert (await world.reply(s.Loaded)).version == 6
            assert [held.closed for held in world.held] == [1]
            assert world.calls[-1] == "resume"
        else:
            assert await world.reply(s.LoadFailed) == s.LoadFailed(version=6, error="no")


async def test_a_failed_swap_ends_the_engine(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """The state of the server is not known."""
    monkeypatch.setattr(module, "END_S", 0.0)
    world.fails["swap"] = ControlError("vLLM did not answer /update_weights within 5 s")
    async with running(monkeypatch, world) as task:
        await world.send(s.Load(manifest=manifest(5)))
        await asyncio.wait([task])
    assert world.replies[1:] == [s.EngineFatal(error=str(world.fails["swap"]))]


async def test_a_version_that_is_staged_is_awaited_by_its_load(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """A load that came before would hold the version twice."""
    async with running(monkeypatch, world):
        await world.send(s.Stage(manifest=manifest(5)), s.Load(manifest=manifest(5)))
        await world.reply(s.Loaded)
    assert [call for call in world.calls if call[0] == "hold"] == [("hold", 5)]
