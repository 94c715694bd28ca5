"""The lifecycle of an attempt under every behavior of an environment, an engine or a
cancellation.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.envs.base import Observation, Score, Step
from rollweave.record.store import TrajectoryReader, TrajectoryStore
from rollweave.record.turn_log import TurnLog
from rollweave.rollout import driver
from rollweave.rollout.driver import Driver, TurnPort
from rollweave.rollout.teacher import TeacherError
from rollweave.schema.base import GroupId, TaskId
from rollweave.schema.commands import (
    AbortTurn,
    CancelTrajectory,
    Continuation,
    Evict,
    RerankTurn,
    StartInit,
)
from rollweave.schema.errors import EngineError, EnvError, RewardError
from rollweave.schema.events import (
    AttemptDelayed,
    EnvReady,
    RewardFailed,
    RewardReady,
    TrajectoryEnded,
    TurnDone,
    TurnFailed,
    TurnRequested,
)
from rollweave.schema.rollouts import AnswerTurn
from rollweave.schema.serving import (
    STATE_WIDTH,
    FinishReason,
    GenerateRequest,
    GenerateResult,
)
from rollweave.schema.work import (
    BLAME_OF,
    Blame,
    Purpose,
    Routes,
    SegmentKind,
    StopReason,
    Task,
    TokenSequence,
    Trajectory,
)
from tests.support.pipelines import (
    CODEC,
    ENGINE,
    LOST,
    TRAJECTORY,
    Harness,
    Script,
    engine_result,
    reply_tokens,
)
from tests.support.virtual_time import run_virtually

pytestmark = pytest.mark.usefixtures("wired")


async def reached(condition: Callable[[], bool]) -> None:
    """Let the tasks run until `condition` holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (fakes have no event for each of their states)
            await asyncio.sleep(0)


def cancel(reason: StopReason = StopReason.STALE, attempt: int = 0) -> CancelTrajectory:
    return CancelTrajectory(trajectory_id=TRAJECTORY, attempt=attempt, reason=reason)


async def test_a_complete_attempt(store: TrajectoryStore) -> None:
    harness = Harness(store)
    ended = await harness.play()
    assert (ended.stop_reason, ended.turns) == (StopReason.FINISHED, 2)
    expected = [EnvReady, TurnRequested, TurnDone, TurnRequested, TurnDone, TrajectoryEnded]
    assert [type(event) for event in harness.events] == expected
    # in the store before the event, not scored yet
    assert store.get([TRAJECTORY])[0].reward is None
    harness.eval()
    ready = await harness.until(RewardReady)
    assert (ready.reward, ready.success) == (1.5, True)
    (trajectory,) = store.get([TRAJECTORY])
    assert (trajectory.reward, trajectory.success, trajectory.blame) == (1.5, True, Blame.NONE)
    (sequence,) = trajectory.sequences
    transcript = [("user", "go"), ("assistant", "hi"), ("user", "on"), ("assistant", "hi")]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in transcript)
    assert CODEC.decode(sequence.tokens) == text.removesuffix("\n")
    assert [sequence.tokens[turn.start : turn.end] for turn in sequence.turns] == [
        reply_tokens("hi")
    ] * 2
    assert [(turn.reward, turn.state_key) for turn in sequence.turns] == [(0.5, "a"), (1.0, "b")]
    assert sequence.versions() == (3, 3)
    assert sequence.output_mask().count(True) == 2 * len(reply_tokens("hi"))
    assert ended.tokens == len(sequence.tokens)
    wanted = ["open", "reset", "step hi", "step hi", "close", "score 1.5 after ['hi', 'hi']"]
    assert harness.provider.log == wanted
    await harness.idle()
    assert harness.active_attempts == 0


async def test_contexts_have_prompt_plan_reward_and_state(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first turn the prompt is known; the state is that of the turn before,
    and does not travel to the worker.
    """
    monkeypatch.setattr("rollweave.rollout.turns.PROMPT_TOKENS", 5)
    steps = [Step.of("on", reward=0.5), Step.of("on", reward=0.5), Step(done=True)]
    harness = Harness(store, Script(steps=steps))
    contexts, sent, send = harness.contexts(), list[Any](), harness.worker.send
    monkeypatch.setattr(
        harness.worker, "send", lambda message: (sent.append(message), send(message))
    )
    state = tuple(value / 4 for value in range(STATE_WIDTH))
    whole = msgspec.structs.replace(engine_result("x" * 90), state=state)
    answered = iter([whole, engine_result("hi"), whole])

    async def generate(_: GenerateRequest) -> GenerateResult:
        return next(answered)

    monkeypatch.setattr(harness.engine, "_generate", generate)
    await harness.play()
    prompt = harness.engine.requests[0].tokens[-5:]
    assert [context.prompt for context in contexts] == [prompt] * 3
    assert [context.plan for context in contexts] == [(), whole.tokens[:64], whole.tokens[:64]]
    assert [context.state for context in contexts] == [(), state, ()]
    assert [context.reward for context in contexts] == [0.0, 0.5, 1.0]
    answers = [message.result for message in sent if isinstance(message, AnswerTurn)]
    assert [result and result.state for result in answers] == [()] * 3


async def test_sampling_seeds_depend_on_run_trajectory_attempt_and_turn(
    store: TrajectoryStore,
) -> None:
    async def seeds(attempt: int) -> list[int]:
        harness = Harness(store)
        harness.init(attempt)
        await harness.until(EnvReady)
        harness.run(attempt)
        for turn in range(2):
            await harness.until(TurnRequested, after=2 * turn + 1)
            harness.turn(turn, attempt=attempt)
        await harness.until(TrajectoryEnded)
        return [request.sampling.seed for request in harness.engine.requests]

    first, again, other = await seeds(0), await seeds(0), await seeds(1)
    assert first == again
    assert len({*first, *other}) == 4


@pytest.mark.parametrize(
    ("script", "reason", "error"),
    [
        (Script(open=EnvError("no room")), StopReason.ENV_ERROR, "starting: no room"),
        (Script(open=OSError("no process")), StopReason.ENV_ERROR, "starting: OSError: no process"),
        (Script(open=None), StopReason.ENV_HANG, "starting did not answer within 0.05 s"),
        (Script(reset=KeyError("map")), StopReason.ENV_ERROR, "starting: KeyError: 'map'"),
        (Script(reset=None), StopReason.ENV_HANG, "starting did not answer"),
        (
            Script(reset="text"),
            StopReason.ENV_ERROR,
            "reset must return an Observation, got 'text'",
        ),
        (
            Script(reset=Observation(messages=())),
            StopReason.FINISHED,
            "",
        ),  # no first message is no garbage
        (Script(reset=Observation.of("x" * 500)), StopReason.ENV_ERROR, "the prompt has"),
        (Script(steps=[EnvError("bad")]), StopReason.ENV_ERROR, "step 0: bad"),
        (
            Script(steps=[TimeoutError("its own")]),
            StopReason.ENV_ERROR,
            "step 0: TimeoutError: its own",
        ),
        (Script(steps=[None]), StopReason.ENV_HANG, "step 0 did not answer within 0.05 s"),
        (Script(steps=[("on", 1.0)]), StopReason.ENV_ERROR, "step 0 must return a Step"),
        (
            Script(steps=[Step.of("on", reward=float("nan"))]),
            StopReason.ENV_ERROR,
            "step 0 must return a Step",
        ),
        (
            Script(steps=[Step()]),
            StopReason.ENV_ERROR,
            "answer to turn 0",
        ),  # not done, and no messages
        (Script(close=None), StopReason.FINISHED, ""),
        (Script(close=OSError("busy")), StopReason.FINISHED, ""),
    ],
)
async def test_every_behavior_of_an_environment_has_a_typed_stop_reason(
    store: TrajectoryStore,
    script: Script,
    reason: StopReason,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollweave.rollout.worker.CLOSE_S", 0.5)
    harness = Harness(store, script, step_s=0.05 if reason is StopReason.ENV_HANG else 10.0)
    ended = await harness.play()
    assert ended.stop_reason is reason
    assert error in ended.error
    assert not any(env.is_open for env in harness.provider.envs)
    await harness.idle()
    entry = TrajectoryReader(store._directory).entries[-1]
    assert TrajectoryReader(store._directory).load(entry).stop_reason is reason
    if reason is not StopReason.FINISHED:
        assert len(store) == 0  # failed attempts are for people, not for training


async def test_limits_end_a_trajectory_and_blame_the_agent(store: TrajectoryStore) -> None:
    endless = Script(steps=[Step.of("on")] * 20)
    assert (await Harness(store, endless, max_turns=3).play()).stop_reason is StopReason.MAX_TURNS
    ended = await Harness(store, endless, max_turns=20, max_tokens=100).play()
    assert ended.stop_reason is StopReason.MAX_TOKENS
    (trajectory,) = store.get([TRAJECTORY])
    assert len(trajectory.sequences[0].tokens) <= 100


async def test_a_turn_cut_by_the_token_limit_is_not_stepped(store: TrajectoryStore) -> None:
    harness = Harness(store, max_tokens=60, max_turn_tokens=128)
    harness.engine.answer = engine_result("x" * 10, finish=FinishReason.LENGTH)
    ended = await harness.play()
    assert ended.stop_reason is StopReason.MAX_TOKENS
    assert harness.provider.log == ["open", "reset", "close"]
    assert harness.engine.requests[0].sampling.max_tokens == 60 - len(
        harness.engine.requests[0].tokens
    )


async def test_a_turn_cut_by_its_own_limit_is_marked_counted_and_reported(
    store: TrajectoryStore,
) -> None:
    cut = Harness(store, max_turn_tokens=4)
    cut.engine.answer = engine_result("righ", finish=FinishReason.LENGTH)
    ended = await cut.play()
    assert (ended.stop_reason, ended.turns) == (StopReason.FINISHED, 2)
    assert cut.provider.log == ["open", "reset", "step righ (cut)", "step righ (cut)", "close"]
    assert [event.cut for event in cut.events if isinstance(event, TurnDone)] == [True, True]
    (trajectory,) = store.get([TRAJECTORY])
    assert [span.finish_reason for span in trajectory.sequences[0].turns] == ["length", "length"]
    cut.eval()
    await cut.until(RewardReady)
    expected = ["", "length", "", "length"]
    assert [message.finish_reason for message in cut.provider.scored[0].messages] == expected
    uncut = Harness(store, max_turn_tokens=4)
    await uncut.play()
    assert [event.cut for event in uncut.events if isinstance(event, TurnDone)] == [False, False]
    (trajectory,) = store.get([TRAJECTORY])
    assert [span.finish_reason for span in trajectory.sequences[0].turns] == ["stop", "stop"]


def test_the_time_budget_excludes_queueing(
    store: TrajectoryStore,
) -> None:

    async def played() -> None:
        harness = Harness(store, Script(steps=[None]), time_s=0.2)
        ended = await harness.play()
        assert (ended.stop_reason, harness.active_attempts) == (StopReason.TIME_BUDGET, 0)
        harness = Harness(store, time_s=0.2)
        harness.engine.answer = engine_result("too slow", finish=FinishReason.TIME)
        ended = await harness.play()
        assert (ended.stop_reason, ended.turns) == (StopReason.TIME_BUDGET, 0)
        assert ended.error == "the active time ran out in turn 0"
        assert not any(isinstance(event, TurnDone) for event in harness.events)
        harness = Harness(store, time_s=1.0)
        harness.init()
        await harness.until(EnvReady)
        await asyncio.sleep(1.2)  # waits for its RUN slot
        harness.run()
        await harness.until(TurnRequested)
        await asyncio.sleep(1.2)  # waits for an engine
        harness.turn(0)
        await harness.until(TurnDone)
        # what is left of it; the engine sees to it
        assert 0 < harness.engine.requests[0].budget_s <= 1.0
        harness.pipeline.cancel(cancel())
        assert (await harness.until(TrajectoryEnded)).stop_reason is StopReason.STALE

    run_virtually(played())


async def test_time_in_the_engines_queue_is_reported_and_not_active(
    store: TrajectoryStore,
) -> None:
    harness = Harness(store, time_s=30.0)
    harness.engine.answer = msgspec.structs.replace(
        engine_result("hi"), queue_s=100.0, generate_s=20.0
    )
    ended = await harness.play()
    budgets = [request.budget_s for request in harness.engine.requests]
    assert budgets[0] - budgets[1] == pytest.approx(20.0, abs=5.0)  # and what the environment took
    assert (await harness.until(TurnDone)).queue_s == 100.0
    # 40 of 30 seconds, known when the environment is to act
    assert ended.stop_reason is StopReason.TIME_BUDGET


async def test_a_failed_turn_is_reported_and_dispatched_again(store: TrajectoryStore) -> None:
    harness = Harness(store)
    await harness.asked()
    harness.engine.answer = EngineError("refused")
    harness.turn(0, 0)
    failed = await harness.until(TurnFailed)
    assert (failed.turn, failed.dispatch, failed.error) == (0, 0, "refused")
    for number, broken in enumerate(
        [
            GenerateResult(
                id="r", tokens=(), logprobs=(), versions=(), finish=FinishReason.ABORTED
            ),
            GenerateResult(id="r", tokens=(1,), logprobs=(), versions=(), finish=FinishReason.STOP),
            engine_result("hi", version=-1),
        ],
        1,
    ):
        harness.engine.answer = broken
        seen = len(harness.events)
        harness.turn(0, number)
        assert (await harness.until(TurnFailed, after=seen)).dispatch == number
    seen = len(harness.events)
    harness.engine.answer = "hi"
    harness.turn(0, 4)
    assert (await harness.until(TurnDone, after=seen)).dispatch == 4
    harness.pipeline.cancel(cancel())
    await harness.idle()


async def test_a_missing_engine_fails_the_turn_but_a_lost_one_does_not(
    store: TrajectoryStore,
) -> None:
    harness = Harness(store)
    await harness.asked()
    harness.engine.answer = LOST
    harness.turn(0, 0)
    await reached(lambda: bool(harness.engine.requests) and harness.engine.live == 0)
    for _ in range(3):  # the answer's way through the callbacks
        await asyncio.sleep(0)
    assert not any(isinstance(event, TurnFailed) for event in harness.events)
    harness.engine_missing = True
    harness.turn(0, 1)
    assert (await harness.until(TurnFailed)).error == "the engine is gone"
    harness.engine_missing, harness.engine.answer = False, "hi"
    harness.turn(0, 2)
    await harness.until(TurnDone)
    harness.pipeline.cancel(cancel())
    await harness.idle()


async def test_an_aborted_turn_is_dispatched_again(store: TrajectoryStore) -> None:
    harness = Harness(store)
    await harness.asked()
    harness.engine.answer = None
    harness.turn(0, 0)
    await reached(lambda: harness.engine.live == 1)
    stale = AbortTurn(trajectory_id=TRAJECTORY, attempt=0, turn=0, engine_id=ENGINE, dispatch=5)
    harness.pipeline.abort_turn(stale)
    await asyncio.sleep(0)
    assert harness.engine.live == 1  # another try is not touched
    harness.pipeline.abort_turn(
        AbortTurn(trajectory_id=TRAJECTORY, attempt=0, turn=0, engine_id=ENGINE, dispatch=0)
    )
    harness.engine.answer = "hi"
    harness.turn(0, 1)
    done = await harness.until(TurnDone)
    assert (done.dispatch, done.cached_tokens, done.output_tokens) == (1, 2, 3)
    harness.pipeline.cancel(cancel())
    await harness.idle()
    assert harness.engine.live == 0


async def test_the_context_is_that_processed_by_the_engine(store: TrajectoryStore) -> None:
    """The context is complete from the moment at which the turn is reported as done,
    even if the episode has not received the answer.
    """
    harness = Harness(store)
    seen: list[tuple[int, ...] | None] = []

    def check_context() -> None:
        seen.append(harness.pipeline.context_of(TRAJECTORY, 0))

    harness.on_post = lambda event: (
        check_context() if isinstance(event, TurnDone | TurnRequested | TrajectoryEnded) else None
    )
    await harness.play()
    first, second = harness.engine.requests
    one, two = (*first.tokens, *reply_tokens("hi")), (*second.tokens, *reply_tokens("hi"))
    assert seen == [None, one, one, two, None]
    assert second.tokens[: len(one)] == one
    assert harness.pipeline.context_of(TRAJECTORY, 1) is None


async def test_a_new_rank_reaches_the_engine_of_the_turn(store: TrajectoryStore) -> None:
    harness = Harness(store)
    await harness.asked()

    def rerank(**changes: Any) -> None:
        names: dict[str, Any] = {
            "trajectory_id": TRAJECTORY,
            "attempt": 0,
            "turn": 0,
            "engine_id": ENGINE,
            "dispatch": 3,
        }
        harness.pipeline.rerank(RerankTurn(**(names | changes), rank=9.0))

    rerank()
    harness.engine.answer = None
    harness.turn(0, 3)
    await reached(lambda: harness.engine.live == 1)
    for stale in ({"attempt": 1}, {"turn": 1}, {"dispatch": 2}):
        rerank(**stale)
    harness.engine_missing = True
    rerank()
    assert harness.engine.ranks == []
    harness.engine_missing = False
    rerank()
    assert harness.engine.ranks == [(harness.engine.requests[0].id, 9.0)]
    harness.pipeline.cancel(cancel())
    await harness.idle()


BAD = "\udcff \ud800"

STAGES = [
    "opening",
    "resetting",
    "waiting to run",
    "waiting for a turn",
    "generating",
    "stepping",
    "closing",
]


@pytest.mark.parametrize("stage", STAGES)
async def test_cancellation_at_any_await_releases_everything(
    store: TrajectoryStore, stage: str
) -> None:
    script = Script(
        open=None if stage == "opening" else "open",
        reset=None if stage == "resetting" else Observation.of("go"),
        steps=[None] if stage == "stepping" else [Step(done=True)],
        close=None if stage == "closing" else "closed",
    )
    harness = Harness(store, script)
    harness.engine.answer = None if stage == "generating" else "hi"
    harness.init()
    if stage not in ("opening", "resetting"):
        await harness.until(EnvReady)
        if stage != "waiting to run":
            harness.run()
            await harness.until(TurnRequested)
            if stage != "waiting for a turn":
                harness.turn(0)
    awaited = {
        "opening": "open",
        "resetting": "reset",
        "stepping": "step hi",
        "closing": "close",
    }.get(stage)
    await reached(
        lambda: (
            awaited in harness.provider.log
            if awaited
            else stage != "generating" or harness.engine.live == 1
        )
    )
    await asyncio.sleep(0)
    harness.pipeline.cancel(cancel())
    ended = await harness.until(TrajectoryEnded)
    await harness.idle()
    assert ended.stop_reason is (StopReason.FINISHED if stage == "closing" else StopReason.STALE)
    assert harness.engine.live == 0
    assert not any(env.is_open for env in harness.provider.envs)
    assert harness.active_attempts == 0
    assert sum(isinstance(event, TrajectoryEnded) for event in harness.events) == 1
    entries = TrajectoryReader(store._directory).entries
    assert len(entries) == 1


@pytest.mark.parametrize("seed", range(20))
async def test_no_attempt_generates_beyond_its_cancellation(
    store: TrajectoryStore, seed: int
) -> None:
    """This holds for any attempt, turn and dispatch, with partial turns kept or not."""
    rng = random.Random(seed)
    attempt, turns, dispatches = rng.randrange(4), rng.randrange(4), rng.randrange(3)
    harness = Harness(
        store,
        Script(steps=[Step.of("on") for _ in range(5)]),
        keep_partial_turns=rng.random() < 0.5,
        max_turns=8,
    )
    harness.init(attempt)
    await harness.until(EnvReady)
    harness.run(attempt)
    requests = 0
    for turn in range(turns + 1):
        await harness.until(TurnRequested, after=requests)
        requests = len(harness.events)
        if turn < turns:
            harness.turn(turn, attempt=attempt)
    for number in range(dispatches):
        harness.engine.answer = EngineError("broken")
        harness.turn(turns, dispatch=number, attempt=attempt)
        await harness.until(TurnFailed, after=requests)
        requests = len(harness.events)
    harness.engine.answer = None
    harness.turn(turns, dispatch=dispatches, attempt=attempt)
    await reached(lambda: harness.engine.live == 1)
    harness.pipeline.cancel(cancel(attempt=attempt))
    await harness.until(TrajectoryEnded)
    await harness.idle()
    assert harness.engine.live == 0, (
        f"attempt {attempt} generates on, in turn {turns}, try {dispatches}"
    )


async def test_a_cancellation_before_the_task_starts_ends_the_attempt(
    store: TrajectoryStore,
) -> None:
    harness = Harness(store)
    harness.init()
    harness.pipeline.cancel(cancel(StopReason.SURPLUS))
    assert (await harness.until(TrajectoryEnded)).stop_reason is StopReason.SURPLUS
    await harness.idle()
    assert harness.provider.log == []


async def test_cancelling_an_unknown_attempt_is_answered(store: TrajectoryStore) -> None:
    harness = Harness(store)
    harness.pipeline.cancel(cancel())
    assert (await harness.until(TrajectoryEnded)).stop_reason is StopReason.STALE


@pytest.mark.parametrize("started", [False, True])
async def test_cancelling_an_evaluation(store: TrajectoryStore, started: bool) -> None:
    harness = Harness(store, Script(score=None))
    await harness.play()
    harness.eval()
    if started:
        await reached(lambda: "score" in harness.provider.log[-1])
    seen = len(harness.events)
    harness.pipeline.cancel(cancel(StopReason.SURPLUS))
    assert (await harness.until(TrajectoryEnded, after=seen)).stop_reason is StopReason.SURPLUS
    await harness.idle()
    assert (len(store), harness.active_attempts) == (0, 0)


@pytest.mark.parametrize(
    ("score", "reason", "error"),
    [
        (RewardError("no"), StopReason.REWARD_ERROR, "the reward: no"),
        (RewardError(BAD), StopReason.REWARD_ERROR, "the reward: \ufffd \ufffd"),
        (
            ZeroDivisionError("by zero"),
            StopReason.REWARD_ERROR,
            "the reward: ZeroDivisionError: by zero",
        ),
        (1.0, StopReason.REWARD_ERROR, "the reward must be a finite number, got 1.0"),
        (Score(reward=float("inf")), StopReason.REWARD_ERROR, "the reward must be a finite number"),
        (None, StopReason.REWARD_HANG, "the reward did not answer within 0.05 s"),
    ],
)
async def test_a_failed_reward_is_never_zero(
    store: TrajectoryStore, score: Any, reason: StopReason, error: str
) -> None:
    harness = Harness(store, Script(score=score), step_s=0.05 if score is None else 10.0)
    failed = await harness.scored(RewardFailed)
    assert failed.stop_reason is reason
    assert error in failed.error
    await harness.idle()
    reader = TrajectoryReader(store._directory)
    trajectory = reader.load(reader.entries[0])
    expected = (None, reason, Blame.ENVIRONMENT)
    assert (trajectory.reward, trajectory.stop_reason, trajectory.blame) == expected


async def test_the_reason_of_a_reward_is_stored(store: TrajectoryStore) -> None:
    harness = Harness(store, Script(score=Score(reward=0.0, reason="too long")))
    await harness.scored()
    assert store.get([TRAJECTORY])[0].result == '{"reason":"too long"}'


async def test_evaluated_trajectories_are_forgotten_and_others_kept_until_evicted(
    store: TrajectoryStore,
) -> None:
    harness = Harness(store)
    await harness.scored()
    assert len(store) == 1
    harness.pipeline.evict(Evict(trajectory_ids=(TRAJECTORY,), reason="stale"))
    assert len(store) == 0
    harness = Harness(store)
    harness.init(attempt=1, purpose=Purpose.EVAL)
    await harness.until(EnvReady)
    harness.run(1)
    for turn in range(2):
        await harness.until(TurnRequested, after=2 * turn + 1)
        harness.turn(turn, attempt=1)
    await harness.until(TrajectoryEnded)
    harness.eval(1)
    await harness.until(RewardReady)
    assert len(store) == 0
    assert len(TrajectoryReader(store._directory).entries) == 2


async def test_ignores_commands_of_another_attempt(store: TrajectoryStore) -> None:
    harness = Harness(store)
    harness.init(attempt=1)
    await harness.until(EnvReady)
    harness.run(attempt=0)
    harness.turn(0, attempt=0)
    harness.pipeline.cancel(cancel(attempt=0))
    await harness.until(TrajectoryEnded)  # the old attempt is not there: answered
    assert harness.active_attempts == 1
    harness.run(attempt=1)
    await harness.until(TurnRequested)
    harness.turn(1, attempt=1)  # not the open turn
    assert harness.engine.requests == []
    harness.pipeline.cancel(cancel(attempt=1))
    await harness.idle()


async def test_the_reward_of_a_discarded_attempt_fails(store: TrajectoryStore) -> None:
    harness = Harness(store)
    harness.eval()
    assert (await harness.until(RewardFailed)).stop_reason is StopReason.REWARD_ERROR


async def test_shutdown_kills_environments_and_stores_the_record(
    store: TrajectoryStore,
) -> None:
    harness = Harness(store, Script(steps=[None]))
    await harness.asked()
    harness.turn(0)
    await reached(lambda: "step hi" in harness.provider.log)
    for task in set(harness.tasks):
        task.cancel()
    await harness.idle()
    assert harness.provider.log[-1] == "kill"
    reader = TrajectoryReader(store._directory)
    (entry,) = reader.entries
    assert reader.load(entry).stop_reason is StopReason.CANCELLED
    segments = reader.load(entry).sequences[0].segments
    assert segments[-1].kind is SegmentKind.OUTPUT


@pytest.mark.parametrize(
    "script",
    [
        *(Script(open=OSError(BAD)), Script(reset=EnvError(BAD))),
        *(Script(reset=Observation.of("go", state_key=BAD)), Script(steps=[ValueError(BAD)])),
        Script(steps=[Step.of("on", state_key=BAD), Step(done=True)]),
        Script(steps=[EnvError("x" * 50_000_000)]),
        Script(steps=[Step.of(BAD), Step(done=True)]),
    ],
)
async def test_text_that_is_not_utf_8_ends_only_its_attempt(
    store: TrajectoryStore, tmp_path: Path, script: Script
) -> None:
    harness = Harness(store, script)
    ended = await harness.play()
    await harness.idle()
    assert not harness.active_attempts
    assert len(ended.error) < 10_000
    msgspec.msgpack.encode(ended)
    (entry,) = TrajectoryReader(tmp_path / "trajectories").entries
    assert TrajectoryReader(tmp_path / "trajectories").load(entry).stop_reason is ended.stop_reason


class Broken:
    """A driver with a bug in one of its stages; otherwise it ends at once."""

    def __init__(self, stage: str) -> None:
        self.stage, self.stop_reason = stage, StopReason.FINISHED
        self.eval_s = self.reward = 0.0
        self.result, self.budget_s, self.turns, self.prompt_tokens = "", 1.0, 0, 1

    def _at(self, stage: str) -> None:
        if self.stage == stage:
            raise RuntimeError(f"a bug in {stage}")

    async def init(self) -> None:
        self._at("init")

    async def run(self, port: TurnPort) -> StopReason:
        self._at("run")
        return StopReason.FINISHED

    async def score(self) -> Score:
        self._at("score")
        return Score(reward=1.0)

    async def close(self) -> None:
        self._at("close")

    def kill(self) -> None:
        return

    def trajectory(self, reason: StopReason, error: str) -> Trajectory:
        self._at("trajectory")
        return msgspec.structs.replace(
            EMPTY, stop_reason=reason, blame=BLAME_OF[reason], error=error
        )


EMPTY = Trajectory(
    id=TRAJECTORY,
    group_id=GroupId("g0"),
    task=Task(id=TaskId("t"), env="scripted", seed=1),
    attempt=0,
    initiated_version=3,
    sequences=(),
    reward=None,
    stop_reason=StopReason.FINISHED,
    blame=Blame.NONE,
)


@pytest.mark.parametrize("stage", ["make", "init", "run", "trajectory"])
async def test_a_bug_in_one_attempt_ends_only_that_attempt(
    store: TrajectoryStore, stage: str
) -> None:
    def make(command: StartInit) -> Driver:
        if stage == "make":
            raise RuntimeError("a bug in make")
        return Broken(stage)

    harness = Harness(store, make=make)
    ended = await harness.play()
    await harness.idle()
    assert ended.stop_reason is StopReason.ENV_ERROR
    assert ended.error.startswith("a failure that Rollweave did not foresee")
    assert f"a bug in {stage}" in ended.error
    assert not harness.active_attempts
    assert len(store) == 0


async def test_a_bug_in_one_score_ends_only_that_attempt(store: TrajectoryStore) -> None:
    harness = Harness(store, make=lambda _: Broken("score"))
    failed = await harness.scored(RewardFailed)
    await harness.idle()
    assert failed.stop_reason is StopReason.REWARD_ERROR
    assert "a bug in score" in failed.error


async def test_a_request_that_cannot_be_sent_fails_only_its_turn(store: TrajectoryStore) -> None:
    harness = Harness(store)

    def refuses(*_: object, **__: object) -> asyncio.Future[GenerateResult]:
        raise ValueError("a frame must not be longer")

    harness.engine.generate = refuses  # type: ignore[method-assign,assignment]
    await harness.asked()
    harness.turn(0)
    failed = await harness.until(TurnFailed)
    assert failed.error == "the request cannot be sent: ValueError: a frame must not be longer"
    harness.pipeline.cancel(cancel())
    await harness.until(TrajectoryEnded)
    await harness.idle()


class FakeTeacher:
    """A teacher that answers with `answer`: a log-prob, an exception, or None to
    hang.
    """

    def __init__(self, answer: float | Exception | None) -> None:
        self.answer = answer
        self.asked = asyncio.Event()
        self.given_up = False

    async def teach(self, sequences: Sequence[TokenSequence]) -> tuple[TokenSequence, ...]:
        self.asked.set()
        if self.answer is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up = True
        if isinstance(self.answer, Exception):
            raise self.answer
        return tuple(
            msgspec.structs.replace(each, teacher=(self.answer or 0.0,) * len(each.tokens))
            for each in sequences
        )


async def test_the_teacher_is_asked_after_the_environment_is_closed(
    store: TrajectoryStore,
) -> None:
    teacher = FakeTeacher(-0.25)
    harness = Harness(store, teach=teacher.teach)
    ended = await harness.play()
    assert ended.stop_reason is StopReason.FINISHED
    assert harness.provider.log[-1] == "close"
    assert harness.provider.log.count("close") == 1
    harness.eval()
    assert (await harness.until(RewardReady)).reward == 1.5
    (trajectory,) = store.get([TRAJECTORY])
    (sequence,) = trajectory.sequences
    assert sequence.teacher == (-0.25,) * len(sequence.tokens)


async def test_a_failure_of_the_teacher_is_blamed_on_the_infrastructure(
    store: TrajectoryStore,
) -> None:
    harness = Harness(store, teach=FakeTeacher(TeacherError("teacher http://a:1: gone")).teach)
    ended = await harness.play()
    expected = (StopReason.TEACHER_ERROR, "teacher http://a:1: gone")
    assert (ended.stop_reason, ended.error) == expected
    reader = TrajectoryReader(store._directory)
    (entry,) = reader.entries
    trajectory = reader.load(entry)
    assert (trajectory.blame, trajectory.reward) == (Blame.INFRASTRUCTURE, None)
    assert trajectory.sequences[0].teacher == ()
    await harness.idle()
    assert harness.active_attempts == 0


async def test_an_attempt_that_waits_for_its_teacher_is_cancelled(store: TrajectoryStore) -> None:
    teacher = FakeTeacher(None)
    harness = Harness(store, teach=teacher.teach)
    playing = asyncio.ensure_future(harness.play())
    await teacher.asked.wait()
    harness.pipeline.cancel(cancel())
    assert (await playing).stop_reason is StopReason.STALE
    assert teacher.given_up
    assert harness.provider.log.count("close") == 1
    await harness.idle()
    assert harness.active_attempts == 0


async def test_the_wait_for_the_teacher_is_not_the_time_of_the_stage(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "DELAY_S", 0.001)
    harness = Harness(store, teach=FakeTeacher(None).teach)
    playing = asyncio.ensure_future(harness.play())
    await harness.until(AttemptDelayed)
    harness.pipeline.cancel(cancel())
    await playing


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.EVAL])
async def test_the_routes_of_each_turn_are_stored_for_training_only(
    store: TrajectoryStore, purpose: Purpose
) -> None:
    """A turn asks for those that no former turn has returned."""
    harness = Harness(store)
    generate = harness.engine._generate

    async def with_routes(request: GenerateRequest) -> GenerateResult:
        result = await generate(request)
        end = len(request.tokens) + len(result.tokens) - 1
        data = bytes(range(request.routes_from, end))
        routes = Routes(start=request.routes_from, end=end, layers=1, top_k=1, data=data)
        return msgspec.structs.replace(result, routes=routes)

    harness.engine._generate = with_routes  # type: ignore[method-assign]
    harness.init(purpose=purpose)
    await harness.until(EnvReady)
    harness.run()
    for turn in range(2):
        await harness.until(TurnRequested, after=2 * turn + 1)
        harness.turn(turn)
    await harness.until(TrajectoryEnded)
    first, second = harness.engine.requests
    sampled = len(reply_tokens("hi"))
    assert (first.routes_from, second.routes_from) == (0, len(first.tokens) + sampled - 1)
    (sequence,) = store.get([TRAJECTORY])[0].sequences
    if purpose is Purpose.EVAL:
        assert sequence.routes == ()
        return
    expected = [(0, second.routes_from), (second.routes_from, sequence.turns[-1].end - 1)]
    assert [(part.start, part.end) for part in sequence.routes] == expected
    assert b"".join(part.data for part in sequence.routes) == bytes(range(sequence.routes[-1].end))


# Attempts that continue after the loss of their controller.


async def rolled_out(harness: Harness, attempt: int, *, turns: int) -> None:
    """Begin the attempt, and let engines answer its first turns."""
    await harness.until(EnvReady)
    harness.run(attempt)
    for number in range(turns):
        await reached(lambda number=number: _open_turn(harness) == number)  # type: ignore[misc]
        harness.turn(number, attempt=attempt)
    await reached(lambda: _open_turn(harness) == turns or _is_over(harness))


def _open_turn(harness: Harness) -> int:
    return max((one.turn for one in harness.events if isinstance(one, TurnRequested)), default=-1)


def _is_over(harness: Harness) -> bool:
    return any(isinstance(event, TrajectoryEnded) for event in harness.events)


THREE = Script(steps=[Step.of("on"), Step.of("further"), Step(reward=1.0, done=True)])


async def interrupted(store: TrajectoryStore, tmp_path: Path) -> str:
    """Record two turns of an attempt, and return the life of their log."""
    with TurnLog(tmp_path / "turns") as log:
        former = Harness(store, THREE, log=log)
        former.init()
        await rolled_out(former, 0, turns=2)
    former.pipeline.cancel(cancel())
    await former.idle()
    return log.life


@pytest.mark.parametrize("repeats", [True, False])
async def test_an_attempt_continues_with_the_recorded_turns(
    store: TrajectoryStore, tmp_path: Path, *, repeats: bool
) -> None:
    """The environment starts again; if it repeats itself, no token is sampled twice."""
    former_life = await interrupted(store, tmp_path)
    with TurnLog(tmp_path / "turns") as log:
        log.keep([(TRAJECTORY, 0, former_life)])
        script = THREE if repeats else Script(steps=[Step.of("elsewhere"), *THREE.steps[1:]])
        harness = Harness(store, script, log=log)
        harness.engine.answer = "ho"
        harness.init(1, continues=Continuation(attempt=0, version=3))
        await rolled_out(harness, 1, turns=3)
        ended = await harness.until(TrajectoryEnded)
        assert (ended.stop_reason, ended.turns) == (StopReason.FINISHED, 3)
        done = [event for event in harness.events if isinstance(event, TurnDone)]
        assert [event.replayed for event in done] == [True, repeats, False]
        assert len(harness.engine.requests) == (1 if repeats else 2)
        (trajectory,) = store.get([TRAJECTORY])
        text = CODEC.decode(trajectory.sequences[0].tokens)
        replies = ["hi", "hi" if repeats else "ho", "ho"]
        assert [part.split("<|im_end|>")[0] for part in text.split("assistant\n")[1:]] == replies
        await harness.idle()
    attempt = (TRAJECTORY, 1, log.life)
    with TurnLog(tmp_path / "turns") as log:  # the next loss finds them as its own
        log.keep([attempt])
        assert len(log.take(TRAJECTORY, 1)) == 3 + (not repeats)


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("use", ["continue", "start over", "evict"])
async def test_an_attempt_of_a_lost_worker_continues_with_the_recorded_turns(
    store: TrajectoryStore, tmp_path: Path, purpose: Purpose, use: str
) -> None:
    """In the life in which it began; two workers may be lost, the second before the
    attempt could begin there.
    """
    with TurnLog(tmp_path / "turns", segment_bytes=1) as log:
        former = Harness(store, THREE, log=log)
        former.init(purpose=purpose)
        await rolled_out(former, 0, turns=2)
        assert former.pipeline.lose_worker(former.port, "killed") == (TRAJECTORY,)
        former.port.send(cancel())
        await former.idle()
        if use == "evict":
            former.pipeline.evict(Evict(trajectory_ids=(TRAJECTORY,), reason="not_continued"))
            assert not log.recorded
            return
        harness = Harness(store, THREE, log=log)
        whole = Continuation(attempt=0, version=None) if use == "continue" else None
        harness.port, worker = None, harness.port  # type: ignore[assignment]
        harness.init(1, purpose=purpose, continues=whole)
        lost = await harness.until(TrajectoryEnded)
        assert lost.stop_reason is StopReason.WORKER_LOST
        harness.port, harness.events = worker, []
        again = Continuation(attempt=1, version=None) if use == "continue" else None
        harness.init(2, purpose=purpose, continues=again)
        await rolled_out(harness, 2, turns=3)
        done = [event for event in harness.events if isinstance(event, TurnDone)]
        assert [event.replayed for event in done] == [use == "continue"] * 2 + [False]
        await harness.idle()


async def test_turns_are_recorded_only_while_an_attempt_is_under_way(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    with TurnLog(tmp_path / "turns", segment_bytes=1) as log:
        harness = Harness(store, log=log)
        await harness.play()
        assert len(list((tmp_path / "turns").iterdir())) == 2
        harness.eval()
        await harness.until(RewardReady)
        harness = Harness(store, log=log)
        await harness.play()
        assert len(list((tmp_path / "turns").iterdir())) == 2, "those of the first are deleted"
        await harness.idle()


async def test_an_attempt_that_starts_over_forgets_the_records_of_the_former_one(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    former_life = await interrupted(store, tmp_path)
    with TurnLog(tmp_path / "turns") as log:
        log.keep([(TRAJECTORY, 0, former_life)])
        harness = Harness(store, log=log)
        harness.init(1)  # what is recorded became too old
        assert not log.recorded
        harness.pipeline.cancel(cancel(attempt=1))
        await harness.idle()
    assert not (tmp_path / "turns").exists()
