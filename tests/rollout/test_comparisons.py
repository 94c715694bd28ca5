"""Pairwise judges: both orders are asked, each member gets its share of wins, and what
fails is kept for another try.
"""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from rollweave.core.policy.comparison import pairs
from rollweave.envs.threads import EnvThreads
from rollweave.record.store import Ended, Scored, TrajectoryStore
from rollweave.rollout.driver import EpisodeStopError
from rollweave.rollout.reward_sources import Finished, Source, finished_attempt, source_of
from rollweave.rollout.rewards import Comparisons, Rewards, check_reward, compare
from rollweave.schema import work
from rollweave.schema.base import GroupId, TaskId, TrajectoryId
from rollweave.schema.chat import Message
from rollweave.schema.commands import CancelComparison, CompareGroup
from rollweave.schema.config.rollout import RewardConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import Event, GroupCompared
from tests.support.judge_server import FakeServer, graded

pytestmark = pytest.mark.usefixtures("quick")

TASK = work.Task(id=TaskId("t"), env="frozenlake", seed=1, tag="frozenlake")


@pytest.fixture
def server(server: FakeServer) -> FakeServer:
    """Let the judge prefer the longer answer."""
    server.answer = lambda _: longest(server.requests[-1])
    return server


def shown(body: dict[str, Any]) -> tuple[str, str]:
    """Return the last words of A and B."""
    conversations = json.loads(body["messages"][1]["content"])
    return conversations["A"][-1]["content"], conversations["B"][-1]["content"]


def longest(body: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict of a judge that prefers the longer answer."""
    a, b = map(len, shown(body))
    return graded(f"Verdict: {'A' if a > b else 'B' if b > a else 'tie'}")


def reward(server: FakeServer, **settings: Any) -> dict[str, Any]:
    judge = {"model": "m", "rubric": "Be fair.", "pairwise": True}
    asked = {"url": f"{server.url}/v1", "judge": judge, "timeout_s": 5.0}
    return {"name": "duel", "weight": 2.0, **asked, **settings}


def unscored(answer: str) -> work.Unscored:
    return work.Unscored(
        missing=("duel",),
        conversation=(Message(role="user", content="?"), Message(role="assistant", content=answer)),
        reward=0.5,
        success=True,
        stop_reason=work.StopReason.FINISHED,
    )


def finished(answer: str, name: str = "g0.0") -> Finished:
    return finished_attempt(TrajectoryId(name), 0, TASK, unscored(answer))


@pytest.fixture
async def judge(server: FakeServer) -> AsyncIterator[Source]:
    config, clock = RewardConfig.model_validate(reward(server)), asyncio.get_running_loop().time
    threads = EnvThreads()
    opened = source_of(config, run_id="run", threads=threads, clock=clock)
    yield opened
    await opened.close()
    threads.close()


async def test_both_orders_are_asked_with_keys_of_their_own(
    server: FakeServer, judge: Source
) -> None:
    assert await compare(judge, finished("long"), finished("a", "g0.1")) == 1.0
    assert await compare(judge, finished("a"), finished("long", "g0.1")) == 0.0
    assert await compare(judge, finished("a"), finished("b", "g0.1")) == 0.5
    assert {shown(body) for body in server.requests[:2]} == {("long", "a"), ("a", "long")}
    keys = {headers["Idempotency-Key"] for headers in server.headers[:2]}
    assert keys == {"run/g0.0/0/g0.1/0/duel", "run/g0.1/0/g0.0/0/duel"}
    assert server.requests[0]["messages"][0]["content"].startswith("Be fair.\n")


async def test_a_judge_that_prefers_a_place_gives_no_preference(
    server: FakeServer, judge: Source
) -> None:
    for verdict in ("A", "B"):
        server.answer = lambda _, verdict=verdict: graded(f"I see.\n**Verdict: {verdict}**")  # type: ignore[misc]
        assert await compare(judge, finished("long"), finished("a", "g0.1")) == 0.5


@pytest.mark.parametrize("text", ["A", "Verdict: C", "Verdict: A or B", "Verdict: A\nDone.", ""])
async def test_an_answer_without_a_verdict_is_a_failure(
    server: FakeServer, judge: Source, text: str
) -> None:
    server.answer = lambda _: graded(text)
    with pytest.raises(
        EpisodeStopError, match=r"must end with a line Verdict: A, .* got"
    ) as raised:
        await compare(judge, finished("x"), finished("y", "g0.1"))
    assert raised.value.reason is work.StopReason.REWARD_UNAVAILABLE


async def test_a_dry_run_has_two_answers_compared(server: FakeServer) -> None:
    config = RewardConfig.model_validate(reward(server))
    assert await asyncio.to_thread(check_reward, config, domain="d", limit_s=5.0) == 0.5
    assert sorted(map(shown, server.requests)) == [("4", "5"), ("5", "4")]


class Group:
    """A group in the store, whose members have these answers, and its comparisons."""

    def __init__(self, server: FakeServer, store: TrajectoryStore, *answers: str) -> None:
        config = RunConfig.model_validate(
            {
                "run": {"name": "r"},
                "model": {"scratch": {}},
                "tasks": [{"env": "frozenlake"}],
                "rewards": [reward(server)],
            }
        )
        loop = asyncio.get_running_loop()
        self.threads = EnvThreads()
        self.rewards = Rewards(config, "run", threads=self.threads, clock=loop.time)
        self.store, self.spans = store, list[str]()
        self.answered: asyncio.Future[GroupCompared] = loop.create_future()
        self.tasks: list[asyncio.Task[None]] = []
        self.comparisons = Comparisons(
            rewards_of=self.rewards.of,
            store=store,
            spawn=self._spawn,
            post=self._post,
            clock=loop.time,
            spans=self,
        )
        for number, answer in enumerate(answers):
            self._score(number, answer)
        self.command = CompareGroup(
            group_id=GroupId("g0"),
            task=TASK,
            rewards={TrajectoryId(f"g0.{number}"): 1.0 for number in range(len(answers))},
            pairs=pairs(len(answers)),
        )

    async def __aenter__(self) -> "Group":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rewards.close()
        self.threads.close()

    def _spawn(self, coroutine: Any, name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.ensure_future(coroutine))
        return self.tasks[-1]

    def _post(self, event: Event) -> None:
        assert isinstance(event, GroupCompared)
        self.answered.set_result(event)

    def episode_span(self, lane: str, name: str, start: float, end: float) -> None:
        self.spans.append(f"{lane}: {name}")

    def episode_over(self, lane: str) -> None:
        self.spans.append(f"{lane} over")

    def _score(self, number: int, answer: str) -> None:
        segment = work.Segment(start=0, end=1, kind=work.SegmentKind.OUTPUT, version=0)
        name = TrajectoryId(f"g0.{number}")
        trajectory = work.Trajectory(
            id=name,
            group_id=GroupId("g0"),
            task=TASK,
            attempt=0,
            initiated_version=0,
            sequences=(work.TokenSequence(tokens=(1,), segments=(segment,), logprobs=(-0.5,)),),
            reward=None,
            stop_reason=work.StopReason.FINISHED,
            blame=work.BLAME_OF[work.StopReason.FINISHED],
        )
        self.store.append(
            Ended(at=1.0, purpose=work.Purpose.TRAIN, member=number, trajectory=trajectory)
        )
        self.store.score(
            Scored(
                at=2.0,
                trajectory_id=name,
                attempt=0,
                reward=0.5,
                success=True,
                stop_reason=work.StopReason.FINISHED,
                blame=work.BLAME_OF[work.StopReason.FINISHED],
                eval_s=0.0,
                rewards={"env": 0.5},
                unscored=unscored(answer),
            )
        )

    async def compared(self) -> GroupCompared:
        self.comparisons.start(self.command)
        return await asyncio.wait_for(self.answered, 30)

    def scores(self) -> list[Scored]:
        scores = [self.store.score_of(name) for name in self.command.rewards]
        return [score for score in scores if score is not None]


async def test_each_member_gets_its_share_of_wins(
    server: FakeServer, store: TrajectoryStore
) -> None:
    async with Group(server, store, "aaa", "a", "aa", "aa") as group:
        event = await group.compared()
        shares = [1.0, 0.0, 0.5, 0.5]
        assert list(event.rewards.values()) == [0.5 + 2.0 * share for share in shares]
        assert event.error == ""
        assert len(server.requests) == 2 * 6, "every pair in both orders"
        assert [score.rewards for score in group.scores()] == [
            {"env": 0.5, "duel": share} for share in shares
        ]
        assert [trajectory.reward for trajectory in store.get(group.command.rewards)] == list(
            event.rewards.values()
        )
        assert all(score.unscored is None for score in group.scores()), "it is not kept for ever"
        assert group.spans == ["g0: reward duel", "g0 over"]
        # the controller was lost after it had stored them: nothing is asked again
        group.answered = asyncio.get_running_loop().create_future()
        assert (await group.compared()).rewards == event.rewards
        assert len(server.requests) == 2 * 6


def failing_about(server: FakeServer, answer: str) -> Callable[[int], Any]:
    """Return the answers of a judge that has no verdict about one answer."""

    def verdict(_: int) -> dict[str, Any]:
        body = server.requests[-1]
        return graded("I cannot tell.") if answer in shown(body) else longest(body)

    return verdict


async def test_a_member_that_is_not_judged_has_no_reward_and_is_asked_about_again(
    server: FakeServer, store: TrajectoryStore
) -> None:
    server.answer = failing_about(server, "?")
    async with Group(server, store, "aaa", "?", "aa") as group:
        event = await group.compared()
        assert event.rewards == {TrajectoryId("g0.0"): 2.5, TrajectoryId("g0.2"): 0.5}
        assert "must end with a line Verdict: A" in event.error
        score = group.scores()[1]
        assert (score.reward, score.stop_reason) == (None, work.StopReason.REWARD_UNAVAILABLE)
        kept = score.unscored
        expected = [("g0.0", None), ("g0.2", None)]
        assert [(one.opponent, one.points) for one in kept.comparisons] == expected
        domain, again = group.rewards.of("frozenlake"), finished("?", "g0.1")
        repeated = functools.partial(domain.compute, again, known=score.rewards, compared=True)
        failed = await repeated(comparisons=kept.comparisons)
        assert (failed.reward, failed.missing) == (None, ("duel",))
        assert "Verdict: A" in failed.error
        server.answer = lambda _: longest(server.requests[-1])
        server.headers.clear()
        outcome = await repeated(comparisons=kept.comparisons)
        assert (outcome.reward, outcome.components) == (0.5, {"env": 0.5, "duel": 0.0})
        assert {headers["Idempotency-Key"] for headers in server.headers} == {
            f"run/{one}/0/{two}/0/duel"
            for pair in (("g0.0", "g0.1"), ("g0.1", "g0.2"))
            for one, two in (pair, pair[::-1])
        }
        changed = msgspec.structs.replace(kept.comparisons[0], reward="other")
        removed = await repeated(comparisons=[changed])
        assert removed.missing[0] == "other"
        assert "no pairwise judge other any longer" in removed.error


async def test_a_cancelled_comparison_asks_no_more(
    server: FakeServer, store: TrajectoryStore
) -> None:
    server.gate.clear()
    async with Group(server, store, "aaa", "a") as group:
        group.comparisons.start(group.command)
        await server.arrived.wait()
        group.comparisons.cancel(CancelComparison(group_id=GroupId("g0")))
        with pytest.raises(asyncio.CancelledError):
            await group.tasks[0]
        assert not group.answered.done()
        assert group.spans == ["g0: reward duel", "g0 over"], "its lane in the trace is free again"
        server.gate.set()


async def test_a_group_that_a_lost_controller_compared_is_not_asked_about_again(
    server: FakeServer, store: TrajectoryStore
) -> None:
    server.answer = failing_about(server, "?")
    async with Group(server, store, "aaa", "?", "aa") as group:
        event = await group.compared()
        scores = group.scores()
        group.answered = asyncio.get_running_loop().create_future()
        server.requests.clear()
        assert await group.compared() == event
        assert server.requests == []
        assert group.scores() == scores, "rescore can still ask about the one that failed"
