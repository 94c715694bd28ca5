"""The turns that no client reads: their servers stream them in long parts, and when a
server is lost in the middle of a turn, the turn continues on another engine behind the
tokens that have arrived (Laminar §3.2, §3.3).
"""

import asyncio
import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import free_port
from packages.servers.tests.server_engines import (
    PROMPT,
    Weights,
    are_sampled,
    started,
)
from packages.servers.tests.streamed import (
    begin,
    connected,
    event,
    probed,
    request,
    streams,
    vllm_part,
    write,
)
from packages.servers.tests.vllm_server import attached_spec, start_vllm_server
from rollweave.engine.clients.responses import ResponseError
from rollweave.engine.clients.streams import (
    REPORT_TOKENS,
    StreamedAnswer,
    merged_result,
    moved_delta,
    remaining_request,
)
from rollweave.rollout.turn_parts import PartialTurn, ProgressReporter
from rollweave.rollout.turns import Turns
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId, GroupId, TaskId
from rollweave.schema.commands import StartInit, StartTurn
from rollweave.schema.errors import EngineError
from rollweave.schema.events import Event, TurnFailed
from rollweave.schema.rollouts import AnswerTurn, StreamTurn, TurnAsked
from rollweave.schema.work import Purpose, Task
from rollweave_servers.reports import ProgressReports
from rollweave_servers.sglang import OwnSglang
from rollweave_servers.vllm import OwnVllm
from tests.engine.clients.wire import Exchange, serving
from tests.support.pipelines import TRAJECTORY, NoSpans

UNREAD: dict[str, float] = {"report_s": s.PROGRESS_S}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_size_of_the_parts_is_asked_for(kind: str) -> None:
    dialect: OwnVllm | OwnSglang = OwnVllm(version=0, stop_ids=())
    if kind == "sglang":
        dialect = OwnSglang(version=0, stop_ids=(), max_context=100)
    for every in (1, REPORT_TOKENS):
        body = json.loads(dialect.encode_streamed(request(), every=every))
        assert (body["stream"], body["sampling_params"]["stream_interval"]) == (True, every)
    assert "stream_interval" not in json.loads(dialect.encode(request()))["sampling_params"]


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_turn_that_a_client_reads_comes_token_by_token(is_read: bool) -> None:
    stream = streams(vllm_part(6), vllm_part(7, 8, finish="stop", spans=[("default", 0, 3)]))
    async with serving(stream, probed=probed) as wire, connected(wire) as engine:
        report_s = s.STREAM_S if is_read else s.PROGRESS_S
        result = await engine.generate(request(), lambda _: None, report_s=report_s)
        assert result.tokens == (6, 7, 8)
        sampling = wire.seen[-1].json_body["sampling_params"]
        assert sampling["stream_interval"] == (1 if is_read else REPORT_TOKENS)


@pytest.mark.parametrize("is_good", [True, False])
async def test_a_server_that_does_not_stream_answers_in_one_piece(is_good: bool) -> None:
    part = vllm_part(6, 7, finish="stop", spans=[("default", 0, 2 if is_good else 1)])

    async def whole(exchange: Exchange) -> None:
        assert exchange.json_body["stream"] is True
        exchange.send(part, Content_Type="application/json; charset=utf-8")

    deltas = list[s.TokenDelta]()
    async with serving(whole, probed=probed) as wire, connected(wire) as engine:
        turn = engine.generate(request(), deltas.append, **UNREAD)
        if is_good:
            assert (await turn).tokens == (6, 7)
        else:
            with pytest.raises(EngineError, match="must cover its 2 tokens"):
                await turn
        assert not deltas


async def test_a_stalled_turn_ends_with_its_budget_and_what_has_arrived() -> None:
    """A server may preempt a turn for long, which is no failure."""
    stalled = streams(vllm_part(6, 7), end=False)
    async with (
        serving(stalled, probed=probed) as wire,
        connected(wire, silence_s=0.01) as engine,
    ):
        result = await engine.generate(request(budget_s=0.3), lambda _: None, **UNREAD)
        assert (result.finish, result.tokens) == (s.FinishReason.TIME, (6, 7))


async def test_a_late_part_of_a_turn_that_nobody_reads_is_no_failure() -> None:
    go_on = asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        begin(exchange)
        write(exchange, event(vllm_part(6)))
        await exchange.writer.drain()
        await go_on.wait()
        write(exchange, event(vllm_part(7, finish="stop", spans=[("default", 0, 2)])))
        write(exchange, b"")

    async with serving(handle, probed=probed) as wire, connected(wire, silence_s=0.01) as engine:
        turn = engine.generate(request(), lambda _: None, **UNREAD)
        await wire.arrived.wait()
        await asyncio.wait({turn}, timeout=0.1)
        go_on.set()
        assert (await turn).tokens == (6, 7)


# The whole way of a turn through several servers, against what they have sampled.

COUNT = 12
TRUTH = tuple(range(20, 20 + COUNT))


def logprobs_of(tokens: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(-token / 10 for token in tokens)


@dataclasses.dataclass
class Life:
    """What one server does: it sends parts of these sizes under versions that grow by
    one behind some parts; at one part it may repeat or omit an event. Then it ends.
    """

    sizes: list[int]
    grows: list[bool]
    fault: str
    fault_at: int
    flushes: list[bool]


LIVES = st.lists(
    st.builds(
        Life,
        sizes=st.lists(st.integers(1, 4), max_size=5),
        grows=st.lists(st.booleans(), min_size=5, max_size=5),
        fault=st.sampled_from(["", "", "twice", "omitted"]),
        fault_at=st.integers(0, 4),
        flushes=st.lists(st.booleans(), min_size=5, max_size=5),
    ),
    max_size=4,
)


class OneServer:
    """A server of one life, which continues the truth behind the request's tokens."""

    def __init__(self, asked: s.GenerateRequest, version: int) -> None:
        self.asked, self.version = asked, version
        rest = remaining_request(asked)
        assert isinstance(rest, s.GenerateRequest)
        self.start = len(rest.tokens) - len(asked.tokens)
        assert rest.tokens == (5, *TRUTH[: self.start])
        self.dialect = OwnVllm(version=version, stop_ids=())
        self.wired = rest
        self.dialect.encode_streamed(rest, every=REPORT_TOKENS)
        self.answer = StreamedAnswer(self.dialect.parts(rest), rest, vocab=100)
        self.spans = list[tuple[str, int, int]]()
        self.sent = 0

    def part(self, size: int) -> bytes:
        """Return the next event, of `size` tokens."""
        first, end = self.sent, min(self.sent + size, COUNT - self.start)
        self.spans.append((str(self.version) if self.version else "default", first, end))
        merged = list[tuple[str, int, int]]()
        for name, a, b in self.spans:
            if merged and merged[-1][0] == name:
                a = merged.pop()[1]
            merged.append((name, a, b))
        self.sent = end
        over = end == COUNT - self.start
        tokens = TRUTH[self.start + first : self.start + end]
        return json.dumps(
            vllm_part(*tokens, finish="length" if over else None, spans=merged)
        ).encode()

    def grow(self) -> None:
        self.version += 1
        self.dialect.changed(self.version, self.version)


def live(life: Life, known: PartialTurn, version: int) -> tuple[s.GenerateResult | None, int]:
    """Let one server work on the turn, and add what it reports to `known`. Return the
    answer, if it is complete, and the server's last version. Raises ResponseError.
    """
    asked = request(count=COUNT, resumed=known.partial)
    server = OneServer(asked, version)

    def take(message: s.Progress) -> None:
        for delta in message.pieces:
            known.append(delta)

    async def report() -> None:
        reports = ProgressReports(take)
        try:
            for at, size in enumerate(life.sizes):
                if server.start + server.sent == COUNT:
                    break
                data = server.part(size)
                faulty = life.fault if at == life.fault_at else ""
                for _ in range({"": 1, "twice": 2, "omitted": 0}[faulty]):
                    delta = server.answer.read(data)
                    if delta is not None:
                        reports.of(asked.id, 1000.0)(moved_delta(asked, delta, 0.0))
                    if life.flushes[at]:
                        reports.flush()
                if life.grows[at]:
                    server.grow()
        finally:
            reports.flush()  # as at the loss of a server

    with asyncio.Runner() as runner:
        runner.run(report())
    if server.start + server.sent < COUNT:
        return None, server.version
    return merged_result(asked, server.answer.result()), server.version


@given(LIVES)
def test_a_continued_turn_has_no_token_twice_and_none_is_lost(lives: list[Life]) -> None:
    """Whatever the servers do: a fault is noticed, or has changed nothing."""
    known, version, result = PartialTurn(), 0, None
    last = Life([COUNT], [False] * 5, "", 0, [True] * 5)
    for life in (*lives, last):
        before = known.partial
        known = PartialTurn(before)
        try:
            result, version = live(life, known, version)
        except ResponseError:
            known = PartialTurn()  # the turn starts over, as in `rollout/turns`
            continue
        partial = known.partial
        if partial is not None:
            count = len(partial.tokens)
            assert partial.tokens == TRUTH[:count]
            assert partial.logprobs == logprobs_of(partial.tokens)
            assert s.spans_cover(partial.versions, count)
            assert before is None or count >= len(before.tokens)
        if result is not None:
            break
    assert result is not None
    assert (result.tokens, result.logprobs) == (TRUTH, logprobs_of(TRUTH))
    assert s.spans_cover(result.versions, COUNT)
    assert not PartialTurn(before).flaw_of(result)


# With servers in processes of their own.


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return Weights(tmp_path)


def begun() -> StartInit:
    return StartInit(
        trajectory_id=TRAJECTORY,
        attempt=0,
        group_id=GroupId("g0"),
        member=0,
        task=Task(id=TaskId("t"), env="scripted", seed=1, tag="scripted"),
        purpose=Purpose.TRAIN,
        initiated_version=0,
    )


def asked(count: int) -> TurnAsked:
    return TurnAsked(
        trajectory_id=TRAJECTORY,
        attempt=0,
        turn=0,
        base=0,
        kept=0,
        tokens=PROMPT,
        sampling=s.Sampling(temperature=0.0, max_tokens=count),
        budget_s=600.0,
        reward=0.0,
    )


def started_on(engine: str, dispatch: int) -> StartTurn:
    return StartTurn(
        trajectory_id=TRAJECTORY,
        attempt=0,
        turn=0,
        engine_id=EngineId(engine),
        rank=0.0,
        dispatch=dispatch,
        resume=True,
    )


async def test_a_turn_continues_where_a_killed_server_has_left_it(
    weights: Weights, tmp_path: Path
) -> None:
    """The whole way of a run in mode decoupled: two servers, their engines, and the
    turns of an attempt. Nothing that has arrived is lost, although it waits for the
    next report.
    """
    ports, count, other = (free_port(), free_port()), 440, tmp_path / "other"
    other.mkdir()
    stalled = tmp_path / "stalled"
    with (
        start_vllm_server(weights.model, ports[0], f"--stall={stalled}") as first,
        start_vllm_server(weights.model, ports[1]),
    ):
        async with (
            started(weights, tmp_path, attached_spec(ports[0])) as (one, _),
            started(weights, other, attached_spec(ports[1], run="h:/other")) as (two, _),
        ):
            events, answers = list[Event](), asyncio.Queue[AnswerTurn | StreamTurn]()
            turns = Turns(
                command=begun(),
                engine={"e0": one, "e1": two}.get,  # type: ignore[arg-type]
                post=events.append,
                clock=asyncio.get_running_loop().time,
                spans=NoSpans(),
                answer=answers.put_nowait,
                progress=ProgressReporter(events.append),
            )
            turns.request(asked(count))
            turns.start(started_on("e0", 0))
            async with asyncio.timeout(60):
                while not (stalled.exists() and stalled.read_text()):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            os.kill(first.pid, signal.SIGKILL)
            await one.lost
            turn = turns._open
            assert turn is not None
            arrived = turn.known.partial
            assert arrived is not None
            assert len(arrived.tokens) == int(stalled.read_text())
            turns.start(started_on("e1", 1))
            answered = await answers.get()
    assert isinstance(answered, AnswerTurn)
    answer = answered.result
    assert answer is not None
    assert answer.resumed_tokens == len(arrived.tokens)
    assert answer.tokens[: len(arrived.tokens)] == arrived.tokens
    assert answer.logprobs[: len(arrived.tokens)] == arrived.logprobs
    assert answer.versions == (s.VersionSpan(start=0, end=len(answer.tokens), version=0),)
    assert len(answer.tokens) == count or answer.finish is s.FinishReason.STOP
    await are_sampled(weights, 0, PROMPT, answer.tokens, answer.logprobs)
    assert not [event for event in events if isinstance(event, TurnFailed)]
