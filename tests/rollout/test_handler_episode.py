"""An attempt driven by a handler, under every behavior of the handler, an agent
program, an engine or a cancellation.
"""

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import openai
import pytest

from rollweave.engine.clients.base import OnTokens
from rollweave.envs.base import Score
from rollweave.envs.handlers.base import Agent, Job, LimitError, Tool
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.record.store import TrajectoryStore
from rollweave.rollout import driver
from rollweave.rollout.chat.codec import AgentConfig, ChatCodec
from rollweave.rollout.gateway.server import GatewayListener
from rollweave.rollout.handler_episode import RESULT_BYTES, HandlerEpisode
from rollweave.sandbox.base import Backend, SandboxSpec
from rollweave.sandbox.provider import Images, Lease
from rollweave.schema import serving as s
from rollweave.schema.chat import Message
from rollweave.schema.commands import CancelTrajectory, StartInit
from rollweave.schema.errors import EngineLostError, ImageError
from rollweave.schema.events import (
    AttemptDelayed,
    EnvReady,
    RewardFailed,
    RewardReady,
    TrajectoryEnded,
    TurnDone,
    TurnRequested,
    TurnWithdrawn,
)
from rollweave.schema.work import Blame, SegmentKind, StopReason, Trajectory
from tests.support.pipelines import CODEC, TRAJECTORY, Harness, engine_result, reply_tokens
from tests.support.virtual_time import run_virtually

pytestmark = pytest.mark.usefixtures("wired")

GO = Message(role="user", content="go")
ON = Message(role="user", content="on")


async def two_turns(agent: Agent) -> None:
    first = await agent.chat([GO])
    await agent.chat([GO, first, ON])


async def nothing(*_: object) -> None:
    return


async def hang(*_: object) -> None:
    await asyncio.Event().wait()


async def stubborn(*_: object) -> None:
    """Ignore cancellation until the test is over."""
    over = asyncio.get_running_loop().create_future()
    STUBBORN.append(over)
    while not over.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(over)


class Foreign(BaseException):
    """A BaseException, as in libraries that cancel by exceptions."""


FOREIGN = [GeneratorExit(), KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError(), Foreign()]


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


STUBBORN: list[asyncio.Future[None]] = []


def raising(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def raises(*_: object) -> None:
        raise error

    return raises


@dataclass
class Played:
    """A handler with the behavior that a test chooses."""

    log: list[str] = field(default_factory=list)
    on_init: Callable[[Job], Awaitable[None]] = nothing
    on_run: Callable[[Agent], Awaitable[None]] = two_turns
    on_eval: Callable[[], Awaitable[Any]] = field(
        default=lambda: _value(Score(reward=2.0, success=True))
    )
    on_error: Callable[[Exception], Awaitable[Any]] = nothing
    result: Any = field(default_factory=lambda: {"patch": "+1"})

    async def init(self, job: Job) -> None:
        self.log.append("init")
        await self.on_init(job)

    async def run(self, agent: Agent) -> None:
        self.log.append("run")
        await self.on_run(agent)

    async def eval(self) -> Score:
        self.log.append("eval")
        return await self.on_eval()  # type: ignore[no-any-return]

    async def close(self) -> None:
        self.log.append("close")

    def kill(self) -> None:
        self.log.append("kill")

    async def init_exception(self, error: Exception) -> Any:
        return await self._record("init", error)

    async def run_exception(self, error: Exception) -> Any:
        return await self._record("run", error)

    async def eval_exception(self, error: Exception) -> Any:
        return await self._record("eval", error)

    async def _record(self, stage: str, error: Exception) -> Any:
        self.log.append(f"{stage} failed: {type(error).__name__}")
        return await self.on_error(error)

    def final_result(self) -> Any:
        self.log.append("result")
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (fakes have no event for each of their states)
            await asyncio.sleep(0)


async def _value(value: Any) -> Any:
    return value


@pytest.fixture
async def listener() -> AsyncIterator[GatewayListener]:
    stage_ = GatewayListener(CODEC, model="test")
    yield stage_
    await stage_.close()
    for over in STUBBORN:
        over.set_result(None)
    STUBBORN.clear()


Play = Callable[..., Harness]


@pytest.fixture
def harness(store: TrajectoryStore, listener: GatewayListener) -> Play:
    """Return what makes the pipeline of a handler."""

    def of(handler: Any, images: Images | None = None, **limits: Any) -> Harness:
        sandboxes = Sandboxes("plain", images=lambda: images)
        sampling = s.Sampling(stop_token_ids=CODEC.stop_token_ids)

        def make(command: StartInit) -> HandlerEpisode:
            return HandlerEpisode(
                command,
                make=handler if callable(handler) else lambda: handler,
                agent=AgentConfig(codec=CODEC, sampling=sampling),
                seed=7,
                clock=asyncio.get_running_loop().time,
                sandboxes=sandboxes,
                listener=listener,
            )

        return Harness(store, make=make, **limits)

    return of


async def ended(stage_: Harness) -> tuple[TrajectoryEnded, Trajectory]:
    """Play until the attempt's RUN is over."""
    over = await stage_.play()
    return over, stage_.store.get([TRAJECTORY])[0]


async def test_names_a_first_prompt_that_does_not_fit(harness: Play) -> None:
    """Like `swe`, the handler lets LimitError propagate: it did ask its agent."""
    prompt = Message(role="user", content="go " * 40)

    async def ask(agent: Agent) -> None:
        await agent.chat([prompt])

    stage_ = harness(Played(on_run=ask), max_tokens=50)
    over = await stage_.play()
    assert over.stop_reason is StopReason.ENV_ERROR
    assert over.error.startswith(
        "the first prompt does not fit into max_tokens: messages must leave room in a context of 50"
    )


async def test_a_handler_sees_that_a_turn_was_cut(harness: Play) -> None:
    replies: list[Message] = []

    async def listen(agent: Agent) -> None:
        replies.append(await agent.chat([GO]))
        replies.append(await agent.chat([GO, replies[0], ON], max_tokens=2))

    stage_ = harness(Played(on_run=listen), max_turn_tokens=4)
    stage_.engine.answer = engine_result("righ", finish=s.FinishReason.LENGTH)
    _, trajectory = await ended(stage_)
    assert [message.finish_reason for message in replies] == ["length", "length"]
    cut = [event.cut for event in stage_.events if isinstance(event, TurnDone)]
    assert cut == [True, False], "the second limit is the handler's"
    (sequence,) = trajectory.sequences
    assert [span.finish_reason for span in sequence.turns] == ["length", "length"]


class NoImages:
    """Images that cannot be obtained, after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def find(self, text: str) -> Lease | None:
        raise NotImplementedError

    async def take(self, text: str, backend: Callable[[], Backend]) -> Lease:
        await asyncio.sleep(self._seconds)
        raise ImageError(f"image {text}: no source has it")

    async def close(self) -> None: ...


IMAGE = SandboxSpec(image="a.toml")


def test_the_wait_for_an_image_is_not_counted(
    harness: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler can do without the image."""

    async def played() -> None:
        monkeypatch.setattr(driver, "DELAY_S", 0.1)

        async def start(job: Job) -> None:
            starting = [job.sandboxes.start(IMAGE) for _ in range(2)]
            failed = await asyncio.gather(*starting, return_exceptions=True)
            assert [type(one) for one in failed] == [ImageError] * 2

        stage_ = harness(Played(on_init=start), NoImages(3.0), step_s=2.0)
        over, trajectory = await ended(stage_)
        assert over.stop_reason is StopReason.FINISHED
        assert trajectory.timing.init_s < 2.0
        assert len([event for event in stage_.events if isinstance(event, AttemptDelayed)]) > 5

    run_virtually(played())


@pytest.mark.parametrize("stage", ["init", "run"])
async def test_a_missing_image_is_no_fault_of_the_agent_or_environment(
    harness: Play, stage: str
) -> None:
    """Even if the handler hides it, and would give a reward."""
    jobs: list[Job] = []

    async def start(job: Job) -> None:
        jobs.append(job)
        if stage == "init":
            await hidden(None)

    async def hidden(_: Agent | None) -> None:
        try:
            await jobs[0].sandboxes.start(IMAGE)
        except ImageError as error:
            raise LookupError("no sandbox") from error

    rewarding = Played(on_init=start, on_run=hidden, on_error=lambda _: _value(Score(reward=1.0)))
    stage_ = harness(rewarding, NoImages(0.0))
    over = await stage_.play()
    expected = (StopReason.IMAGE_ERROR, "image a.toml: no source has it")
    assert (over.stop_reason, over.error) == expected


async def test_a_complete_attempt(harness: Play) -> None:
    handler = Played()
    stage_ = harness(handler)
    over, trajectory = await ended(stage_)
    assert (over.stop_reason, over.turns) == (StopReason.FINISHED, 2)
    kinds = [EnvReady, TurnRequested, TurnDone, TurnRequested, TurnDone, TrajectoryEnded]
    assert [type(event) for event in stage_.events] == kinds
    stage_.eval()
    ready = await stage_.until(RewardReady)
    assert (ready.reward, ready.success) == (2.0, True)
    (trajectory,) = stage_.store.get([TRAJECTORY])
    assert json.loads(trajectory.result) == {"patch": "+1"}
    (sequence,) = trajectory.sequences
    reported = [("user", "go"), ("assistant", "hi"), ("user", "on"), ("assistant", "hi")]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in reported)
    assert CODEC.decode(sequence.tokens) == text.removesuffix("\n")
    assert [sequence.tokens[turn.start : turn.end] for turn in sequence.turns] == [
        reply_tokens("hi")
    ] * 2
    assert sequence.versions() == (3, 3)
    assert handler.log == ["init", "run", "close", "eval", "result"]
    await stage_.idle()
    assert stage_.active_attempts == 0


async def test_contexts_of_a_handler_have_prompt_plan_and_state(harness: Play) -> None:
    stage_ = harness(Played())
    contexts, state = stage_.contexts(), (0.5,) * s.STATE_WIDTH
    stage_.engine.answer = msgspec.structs.replace(engine_result("hi"), state=state)
    await ended(stage_)
    prompt = stage_.engine.requests[0].tokens
    assert prompt
    known = [(context.prompt, context.plan, context.state) for context in contexts]
    assert known == [(prompt, (), ()), (prompt, reply_tokens("hi"), state)]


async def test_a_rewritten_context_and_a_second_agent_open_sequences(harness: Play) -> None:
    async def run(agent: Agent) -> None:
        first = await agent.chat([GO])
        await asyncio.gather(agent.chat([ON]), agent.chat([GO, first, ON]), agent.chat([GO]))

    stage_ = harness(Played(on_run=run))
    over, trajectory = await ended(stage_)
    assert (over.stop_reason, over.turns) == (StopReason.FINISHED, 4)
    outputs = [turn for sequence in trajectory.sequences for turn in sequence.turns]
    assert (len(trajectory.sequences), len(outputs)) == (3, 4)


async def test_seeds_differ_by_turn_and_attempt(harness: Play) -> None:
    stage_ = harness(Played)
    await stage_.play()
    seeds = [request.sampling.seed for request in stage_.engine.requests]
    assert len(set(seeds)) == 2


@pytest.mark.parametrize("error", [ValueError("boom"), *FOREIGN])
@pytest.mark.parametrize("stage", ["make", "init", "run", "eval"])
async def test_a_stage_that_raises(harness: Play, stage: str, error: BaseException) -> None:
    handler = Played(**{} if stage == "make" else {f"on_{stage}": raising(error)})

    def fails() -> Any:
        raise error

    stage_ = harness(fails if stage == "make" else handler)
    over = await stage_.play()
    if stage == "eval":
        assert over.stop_reason is StopReason.FINISHED
        stage_.eval()
        failed = await stage_.until(RewardFailed)
        assert failed.stop_reason is StopReason.REWARD_ERROR
        text = failed.error
    else:
        assert over.stop_reason is StopReason.ENV_ERROR
        text = over.error
    assert type(error).__name__ in text
    if stage != "make":
        assert any(line.startswith(f"{stage} failed: ") for line in handler.log)
        assert "close" in handler.log
        assert "result" in handler.log
    await stage_.idle()


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
@pytest.mark.parametrize("how", [hang, stubborn])
async def test_a_stage_that_hangs(
    harness: Play, stage: str, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave.rollout.handler_episode.CANCEL_S", 0.2)
    handler = Played(**{f"on_{stage}": how})
    # stages before the one that hangs must not exceed it on a busy machine
    step_s = 0.05 if stage == "init" else 0.3
    stage_ = harness(handler, step_s=step_s)
    over = await stage_.play()
    if stage == "eval":
        stage_.eval()
        assert (await stage_.until(RewardFailed)).stop_reason is StopReason.REWARD_HANG
    else:
        expected = (StopReason.ENV_HANG, f"{stage} did not answer within {step_s:g} s")
        assert (over.stop_reason, over.error) == expected
    await stage_.idle()


@pytest.mark.parametrize(
    "how", [stubborn, raising(SystemExit()), raising(asyncio.CancelledError())]
)
@pytest.mark.parametrize("place", ["close", "hook"])
async def test_slow_hooks_do_not_delay_the_pipeline(
    harness: Play, place: str, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave.rollout.handler_episode.CANCEL_S", 0.2)
    monkeypatch.setattr("rollweave.rollout.worker.CLOSE_S", 0.5)

    class Closed(Played):
        async def close(self) -> None:
            await how()

    failing = raising(ValueError("no"))
    handler = Closed() if place == "close" else Played(on_run=failing, on_error=how)
    over = await harness(handler).play()
    assert over.stop_reason is (StopReason.FINISHED if place == "close" else StopReason.ENV_ERROR)
    assert ("kill" if place == "close" else "close") in handler.log


def test_waiting_for_a_turn_is_not_active_time(harness: Play) -> None:
    """The interval between turns is limited, the wait for a turn is not."""

    async def played() -> None:
        stage_ = harness(Played(), step_s=1.0)
        await stage_.asked()
        await asyncio.sleep(1.2)  # longer than a step may take: the turn queues
        stage_.turn(0)
        await stage_.until(TurnDone)
        await stage_.until(TurnRequested, after=3)
        stage_.turn(1)
        over = await stage_.until(TrajectoryEnded)
        assert over.stop_reason is StopReason.FINISHED
        timing = stage_.store.get([TRAJECTORY])[0].timing
        assert (timing.env_s, timing.queue_s) == (0.0, pytest.approx(1.2))

    run_virtually(played())


async def test_the_budget_runs_out_in_a_stage(harness: Play) -> None:
    stage_ = harness(Played(on_run=hang), time_s=0.05)
    over = await stage_.play()
    assert (over.stop_reason, "ran out in run" in over.error) == (StopReason.TIME_BUDGET, True)


async def test_the_budget_runs_out_in_a_turn(harness: Play) -> None:
    stage_ = harness(Played())
    stage_.engine.answer = engine_result("h", finish=s.FinishReason.TIME)
    over = await stage_.play()
    assert over.stop_reason is StopReason.TIME_BUDGET


async def test_a_handler_cannot_ignore_a_stop(harness: Play) -> None:
    async def run(agent: Agent) -> None:
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await agent.chat([GO])

    stage_ = harness(Played(on_run=run))
    stage_.engine.answer = engine_result("h", finish=s.FinishReason.TIME)
    assert (await stage_.play()).stop_reason is StopReason.TIME_BUDGET


@pytest.mark.parametrize("lets_pass", [True, False])
async def test_turns_and_context_are_limited(harness: Play, lets_pass: bool) -> None:
    reported: list[Exception] = []

    async def run(agent: Agent) -> None:
        messages = [GO]
        try:
            while True:
                messages += [await agent.chat(messages), ON]
        except LimitError as error:
            reported.append(error)
            if lets_pass:
                raise

    stage_ = harness(Played(on_run=run), max_turns=3)
    over, trajectory = await ended(stage_)
    assert (over.stop_reason, over.turns) == (StopReason.MAX_TURNS, 3)
    assert trajectory.blame is Blame.AGENT
    stage_ = harness(Played(on_run=run), max_turns=30, max_tokens=100)
    over, trajectory = await ended(stage_)
    assert over.stop_reason is StopReason.MAX_TOKENS
    assert all(len(sequence.tokens) <= 100 for sequence in trajectory.sequences)
    assert len(reported) == 2


async def test_an_agent_that_shortens_its_context_finishes(harness: Play) -> None:
    async def run(agent: Agent) -> None:
        with pytest.raises(LimitError):
            await agent.chat([Message(role="user", content="go " * 40)])
        await agent.chat([GO])

    over = await harness(Played(on_run=run), max_tokens=100).play()
    assert over.stop_reason is StopReason.FINISHED


class Plain:
    """A handler whose methods are not coroutines: they raise when they are called."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def init(self, job: Job) -> None:
        return

    def run(self, agent: Agent) -> Any:
        raise self._error

    def run_exception(self, error: BaseException) -> Any:
        raise self._error

    def close(self) -> Any:
        raise self._error

    eval = kill = final_result = close


@pytest.mark.parametrize("error", FOREIGN)
async def test_a_raising_hook_fails_only_its_attempt(harness: Play, error: BaseException) -> None:
    handler = Played(on_run=raising(ValueError("first")), on_error=raising(error))
    over = await harness(handler).play()
    assert over.stop_reason is StopReason.ENV_ERROR
    assert f"then run_exception raised {type(error).__name__}" in over.error
    assert "close" in handler.log


@pytest.mark.parametrize("error", FOREIGN)
async def test_a_raising_plain_method_fails_only_its_attempt(
    harness: Play, error: BaseException
) -> None:
    over = await harness(Plain(error)).play()
    assert over.stop_reason is StopReason.ENV_ERROR
    assert over.error.startswith(f"run raised {type(error).__name__}")


async def test_exceptions_of_a_cancelled_stage_are_retrieved(harness: Play) -> None:
    async def init(job: Job) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise SystemExit(3)

    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    over = await harness(Played(on_init=init), step_s=0.01).play()
    assert over.stop_reason is StopReason.ENV_HANG
    gc.collect()
    assert reported == []


async def test_a_handler_may_attribute_a_failure_to_the_agent(harness: Play) -> None:
    async def run(agent: Agent) -> None:
        await two_turns(agent)
        raise ValueError("it broke its sandbox")

    handler = Played(on_run=run, on_error=lambda _: _value(Score(reward=-1.0, success=False)))
    stage_ = harness(handler)
    over = await stage_.play()
    assert over.stop_reason is StopReason.FINISHED
    stage_.eval()
    ready = await stage_.until(RewardReady)
    assert (ready.reward, ready.success) == (-1.0, False)
    assert "eval" not in handler.log

    handler = Played(on_eval=raising(ValueError("no verdict")), on_error=lambda _: _value(0.25))
    stage_ = harness(handler)
    assert (await stage_.scored()).reward == 0.25


@pytest.mark.parametrize("reward", [float("nan"), "much", None, Score(reward=float("inf"))])
async def test_invalid_rewards(harness: Play, reward: Any) -> None:
    stage_ = harness(Played(on_eval=lambda: _value(reward)))
    failed = await stage_.scored(RewardFailed)
    assert failed.stop_reason is StopReason.REWARD_ERROR
    assert "eval" in failed.error


async def test_the_reason_of_a_reward_is_part_of_the_result(harness: Play) -> None:
    async def scored() -> Score:
        return Score(reward=0.0, reason="too long" * 1000)

    stage_ = harness(Played(result={"a": 1}, on_eval=scored))
    await stage_.scored()
    result = json.loads(stage_.store.get([TRAJECTORY])[0].result)
    assert result["a"] == 1
    assert result["reason"].startswith("too longtoo long")
    assert len(result["reason"]) < 2000


@pytest.mark.parametrize(
    "result",
    [
        *(ValueError("no"), {"a": object()}, {"a": float("nan")}, "x" * RESULT_BYTES),
        *(SystemExit(), nested(101), nested(100_000)),
    ],
)
async def test_an_invalid_result_costs_no_reward(harness: Play, result: Any) -> None:
    stage_ = harness(Played(result=result))
    await stage_.scored()
    trajectory = stage_.store.get([TRAJECTORY])[0]
    assert trajectory.reward == 2.0
    assert "final_result" in json.loads(trajectory.result)["error"]


@pytest.mark.parametrize(
    ("messages", "max_tokens", "rule"), [([], None, "messages must"), ([GO], 0, "max_tokens must")]
)
async def test_refuses_invalid_chat_arguments(
    harness: Play, messages: list[Message], max_tokens: int | None, rule: str
) -> None:
    async def run(agent: Agent) -> None:
        await agent.chat(messages, max_tokens=max_tokens)

    over = await harness(Played(on_run=run)).play()
    assert over.stop_reason is StopReason.ENV_ERROR
    assert rule in over.error


async def test_a_record_has_the_tools_that_the_agent_was_shown_last(
    harness: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatCodec, "shows_tools", True)
    tools = [
        Tool(name=name, description="", parameters={"type": "object"}, call=raising(ValueError()))
        for name in ("look", "go")
    ]

    async def run(agent: Agent) -> None:
        await agent.chat([GO], tools=tools[:1])
        await agent.chat([GO], tools=tools)

    stage_ = harness(Played(on_run=run))
    await stage_.scored()
    (trajectory,) = stage_.store.get([TRAJECTORY])
    shown = [json.loads(tool)["function"]["name"] for tool in trajectory.tools]
    assert shown == ["look", "go"]


async def test_a_handler_must_ask_the_agent(harness: Play) -> None:
    over = await harness(Played(on_run=nothing)).play()
    assert over.stop_reason == StopReason.ENV_ERROR
    assert over.error == "run must ask the agent at least once, and returned without asking"


@pytest.mark.parametrize("place", ["init", "queue", "turn", "tool", "eval"])
async def test_cancellation_at_any_await(harness: Play, place: str) -> None:
    there = asyncio.Event()

    async def stay(*_: object) -> None:
        there.set()
        await hang()

    async def tool(agent: Agent) -> None:
        await agent.chat([GO])
        await stay()

    stages: dict[str, Any] = {
        "init": {"on_init": stay},
        "tool": {"on_run": tool},
        "eval": {"on_eval": stay},
    }
    handler = Played(**stages.get(place, {}))
    stage_ = harness(handler)
    if place in ("tool", "eval"):
        playing = asyncio.ensure_future(stage_.play())
        if place == "eval":
            await playing
            stage_.eval()
        await there.wait()
    else:
        stage_.init()
        if place == "init":
            await there.wait()
        else:
            await stage_.until(EnvReady)
            stage_.run()
            await stage_.until(TurnRequested)
        if place == "turn":
            stage_.engine.answer = None
            stage_.turn(0)
            await reached(lambda: stage_.engine.live == 1)
    seen = len(stage_.events)
    stage_.pipeline.cancel(
        CancelTrajectory(trajectory_id=TRAJECTORY, attempt=0, reason=StopReason.CANCELLED)
    )
    over = await stage_.until(TrajectoryEnded, after=seen)
    assert over.stop_reason is StopReason.CANCELLED
    assert not any(isinstance(event, TurnWithdrawn) for event in stage_.events)
    assert "close" in handler.log
    await stage_.idle()
    assert (stage_.active_attempts, stage_.engine.live) == (0, 0)


# Agent programs.


async def test_an_agent_program_at_the_endpoint(harness: Play) -> None:
    async def run(agent: Agent) -> None:
        endpoint = await agent.endpoint()
        async with openai.AsyncOpenAI(
            base_url=endpoint.url, api_key=endpoint.token, max_retries=0
        ) as client:
            first = await client.chat.completions.create(
                model="x", messages=[{"role": "user", "content": "go"}], reasoning_effort="high"
            )
            assert first.choices[0].message.content == "hi"
            await agent.endpoint(unreadable="refuse")
            with pytest.raises(openai.BadRequestError, match="reasoning_effort must be null"):
                await client.chat.completions.create(
                    model="x", messages=[{"role": "user", "content": "go"}], reasoning_effort="low"
                )
        await agent.chat([GO, Message(role="assistant", content="hi"), ON])  # the same session

    stage_ = harness(Played(on_run=run))
    over, trajectory = await ended(stage_)
    assert (over.stop_reason, over.turns) == (StopReason.FINISHED, 2)
    (sequence,) = trajectory.sequences
    kinds = [SegmentKind.PROMPT, SegmentKind.OUTPUT, SegmentKind.OBSERVATION, SegmentKind.OUTPUT]
    assert [segment.kind for segment in sequence.segments] == kinds
    assert [str(one) for one in trajectory.ignored] == [
        "reasoning_effort = 'high': ignored, in 1 request"
    ]


async def test_a_program_reads_a_turn_that_two_engines_sample(
    harness: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first engine is lost after the program has read the beginning; what the
    program reads is what is recorded.
    """
    calls: list[tuple[s.GenerateRequest, OnTokens, asyncio.Future[s.GenerateResult]]] = []
    read: list[str] = []

    def generate(
        request: s.GenerateRequest, on_tokens: OnTokens | None = None, *, report_s: float = 1.0
    ) -> asyncio.Future[s.GenerateResult]:
        assert on_tokens is not None
        calls.append((request, on_tokens, asyncio.get_running_loop().create_future()))
        return calls[-1][2]

    async def run(agent: Agent) -> None:
        endpoint = await agent.endpoint()
        async with openai.AsyncOpenAI(
            base_url=endpoint.url, api_key=endpoint.token, max_retries=0
        ) as client:
            stream = await client.chat.completions.create(
                model="x", messages=[{"role": "user", "content": "go"}], stream=True
            )
            read.extend(
                [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            )

    def delta(start: int, end: int, version: int) -> s.TokenDelta:
        whole = engine_result("hello")
        span = s.VersionSpan(start=start, end=end, version=version)
        tokens, logprobs = whole.tokens[start:end], whole.logprobs[start:end]
        return s.TokenDelta(id="", start=start, tokens=tokens, logprobs=logprobs, versions=(span,))

    stage_ = harness(Played(on_run=run))
    monkeypatch.setattr(stage_.engine, "generate", generate)
    stage_.init()
    await stage_.until(EnvReady)
    stage_.run()
    asked = await stage_.until(TurnRequested)
    assert asked.streamed
    stage_.turn(0)
    calls[0][1](delta(0, 3, version=3))
    calls[0][2].set_exception(EngineLostError("killed"))
    await reached(lambda: calls[0][2].done())
    stage_.turn(0, dispatch=1, resume=True)
    request, on_tokens, answer = calls[1]
    assert request.resumed.tokens == reply_tokens("hel", end=False)
    on_tokens(delta(3, 4, version=4))
    spans = (s.VersionSpan(start=0, end=3, version=3), s.VersionSpan(start=3, end=6, version=4))
    whole = engine_result("hello")
    answer.set_result(msgspec.structs.replace(whole, versions=spans, resumed_tokens=3))
    over = await stage_.until(TrajectoryEnded)
    assert (over.stop_reason, "".join(read)) == (StopReason.FINISHED, "hello")
    (sequence,) = stage_.store.get([TRAJECTORY])[0].sequences
    assert sequence.tokens[-6:] == whole.tokens
    outputs = [part for part in sequence.segments if part.kind is SegmentKind.OUTPUT]
    assert [(part.end - part.start, part.version) for part in outputs] == [(3, 3), (3, 4)]


async def test_an_abandoned_call_withdraws_its_turn(harness: Play) -> None:
    async def run(agent: Agent) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await agent.chat([GO])
        await agent.chat([GO])

    stage_ = harness(Played(on_run=run))
    stage_.init()
    await stage_.until(EnvReady)
    stage_.run()
    await stage_.until(TurnWithdrawn)  # it was not granted
    again = await stage_.until(TurnRequested, after=3)
    assert again.turn == 1
    stage_.turn(1)
    over = await stage_.until(TrajectoryEnded)
    assert (over.stop_reason, over.turns) == (StopReason.FINISHED, 1)


async def test_a_call_that_outlives_run_is_withdrawn_before_the_end(harness: Play) -> None:
    left: list[asyncio.Task[Any]] = []

    async def run(agent: Agent) -> None:
        await agent.chat([GO])
        left.append(asyncio.create_task(agent.chat([ON])))
        await asyncio.sleep(0.01)

    stage_ = harness(Played(on_run=run))
    await stage_.asked()
    stage_.turn(0)
    await stage_.until(TrajectoryEnded)
    kinds = [type(event) for event in stage_.events]
    assert kinds[-3:] == [TurnRequested, TurnWithdrawn, TrajectoryEnded]
    assert (await asyncio.gather(*left, return_exceptions=True))[0] is not None


async def test_the_agent_refuses_calls_after_run(harness: Play) -> None:
    """Otherwise a reward would wait without limit for a turn that is never granted."""
    agents: list[Agent] = []

    async def run(agent: Agent) -> None:
        agents.append(agent)
        await agent.chat([GO])

    async def judge() -> Score:
        await agents[0].chat([ON])
        return Score(reward=1.0)

    stage_ = harness(Played(on_run=run, on_eval=judge), step_s=5.0)
    failed = await stage_.scored(RewardFailed)
    assert isinstance(failed, RewardFailed)
    assert failed.stop_reason == StopReason.REWARD_ERROR
    assert failed.error == f"eval: session must be open, got '{TRAJECTORY}-0', which is closed"
    assert len([event for event in stage_.events if isinstance(event, TurnRequested)]) == 1


async def test_a_session_closes_with_its_attempt(harness: Play) -> None:
    reached: list[Any] = []

    async def run(agent: Agent) -> None:
        await agent.chat([GO])
        reached.append(await agent.endpoint())

    await harness(Played(on_run=run)).play()
    async with openai.AsyncOpenAI(
        base_url=reached[0].url, api_key=reached[0].token, max_retries=0
    ) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(
                model="x", messages=[{"role": "user", "content": "go"}]
            )


SURROGATE = "\udcff"


async def test_text_of_a_handler_is_made_valid(harness: Play) -> None:
    async def run(agent: Agent) -> None:
        await agent.chat([Message(role="user", content=SURROGATE, name=SURROGATE)])

    stage_ = harness(Played(on_run=run, result={SURROGATE: [SURROGATE], "deep": nested(99)}))
    assert (await stage_.play()).stop_reason is StopReason.FINISHED
    stage_.eval()
    await stage_.until(RewardReady)
    (trajectory,) = stage_.store.get([TRAJECTORY])
    assert json.loads(trajectory.result)["\ufffd"] == ["\ufffd"]
    trajectory.result.encode()


@pytest.mark.parametrize("stage", ["on_init", "on_run"])
async def test_an_error_of_a_handler_is_made_valid(harness: Play, stage: str) -> None:
    stage_ = harness(Played(**{stage: raising(OSError(SURROGATE))}))  # type: ignore[arg-type]
    ended = await stage_.play()
    assert "raised OSError: \ufffd" in ended.error
    ended.error.encode()
