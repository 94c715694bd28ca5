"""The comparisons of a group's members by pairwise judges, in the controller.

The core says which members are compared (`core/groups.compare`). Invariants: each
group whose comparison is begun and not cancelled ends with one `GroupCompared`, after
the new scores of all its members are in the store, in one record, so that a group is
compared or not when the controller is lost; a member without a reward keeps what it
would be computed from, so that `rollweave rescore` can ask again.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rollweave.core.policy.comparison import share_of_wins
from rollweave.record.store import Scored, TrajectoryStore
from rollweave.rollout.budget import EpisodeStopError
from rollweave.rollout.pairwise import PairwiseJudge
from rollweave.rollout.reward_sources import Finished, finished_attempt
from rollweave.rollout.rewards import DomainRewards, MissingRewardsError
from rollweave.rollout.turns import Spans
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.commands import CancelComparison, CompareGroup
from rollweave.schema.events import Event, GroupCompared
from rollweave.schema.work import BLAME_OF, Comparison, StopReason

FORGOTTEN = "a member's conversation is not in the store"
"""Error of a comparison with a member that is not kept."""


class SpawnTask(Protocol):
    """Runs a coroutine as a task of an owner that awaits it."""

    def __call__(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start the task."""


class JudgeComparisons:
    """The comparisons of one judge: the points of each, in the order of `pairs`, and
    the errors of those that failed.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._pairs = pairs
        self.points: list[float | None] = []
        self.errors: list[EpisodeStopError] = []

    async def ask(self, judge: PairwiseJudge, members: Sequence[Finished | None]) -> None:
        """Ask for all comparisons at once."""
        asked = (_points(judge, members[one], members[two]) for one, two in self._pairs)
        for result in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(result, EpisodeStopError):
                self.errors.append(result)
                self.points.append(None)
            elif isinstance(result, BaseException):
                raise result
            else:
                self.points.append(result)

    def of(self, member: int) -> list[tuple[int, float | None]]:
        """Return the member's opponents, with its points against each."""
        opponents: list[tuple[int, float | None]] = []
        for (one, two), points in zip(self._pairs, self.points, strict=True):
            if member == one:
                opponents.append((two, points))
            elif member == two:
                opponents.append((one, None if points is None else 1.0 - points))
        return opponents


async def _points(judge: PairwiseJudge, one: Finished | None, two: Finished | None) -> float:
    if one is None or two is None:
        raise EpisodeStopError(StopReason.REWARD_ERROR, FORGOTTEN)
    return await judge.compare(one, two)


class Comparisons:
    """Compares groups. `rewards_of` returns the rewards of a task domain."""

    def __init__(
        self,
        *,
        rewards_of: Callable[[str], DomainRewards | None],
        store: TrajectoryStore,
        spawn: SpawnTask,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        spans: Spans,
    ) -> None:
        self._rewards_of, self._store, self._spawn = rewards_of, store, spawn
        self._post, self._clock, self._spans = post, clock, spans
        self._tasks: dict[GroupId, asyncio.Task[None]] = {}

    def start(self, command: CompareGroup) -> None:
        """Begin to compare the members of a group."""
        group_id = command.group_id
        self._tasks[group_id] = self._spawn(self._run(command), f"compare {group_id}")

    def cancel(self, command: CancelComparison) -> None:
        """Ask no more about a group."""
        task = self._tasks.pop(command.group_id, None)
        if task is not None:
            task.cancel()

    async def _run(self, command: CompareGroup) -> None:
        try:
            await self._compare(command)
        finally:
            self._spans.episode_over(command.group_id)

    async def _compare(self, command: CompareGroup) -> None:
        rewards = self._rewards_of(command.task.tag)
        assert rewards is not None, "the core compares groups of domains with pairwise judges"
        scores = {name: self._store.score_of(name) for name in command.rewards}
        members = [_finished(command, score) for score in scores.values()]
        began = self._clock()
        asked = {name: JudgeComparisons(command.pairs) for name in rewards.judges}
        await asyncio.gather(
            *(
                self._one(name, judge, asked[name], members, command.group_id)
                for name, judge in rewards.judges.items()
                if any(members)
            )
        )
        self._tasks.pop(command.group_id, None)
        compared: list[Scored] = []
        known: dict[TrajectoryId, float] = {}
        errors: dict[str, None] = {}
        for number, (name, score) in enumerate(scores.items()):
            if score is None:
                continue
            if _is_open(score):
                score = msgspec.structs.replace(
                    _score(score, number, asked, members, rewards),
                    at=self._clock(),
                    eval_s=score.eval_s + self._clock() - began,
                )
                compared.append(score)
            if score.reward is not None:
                known[name] = score.reward
            else:
                errors[score.error] = None
        if compared:
            self._store.rescore(compared)
        self._post(
            GroupCompared(
                group_id=command.group_id,
                rewards=known,
                error="; ".join(errors) or ("" if len(known) == len(scores) else FORGOTTEN),
            )
        )

    async def _one(
        self,
        name: str,
        judge: PairwiseJudge,
        asked: JudgeComparisons,
        members: Sequence[Finished | None],
        lane: GroupId,
    ) -> None:
        began = self._clock()
        await asked.ask(judge, members)  # once it is cancelled, its lane is released
        self._spans.episode_span(lane, f"reward {name}", began, self._clock())


def _is_open(score: Scored) -> bool:
    """Return False for a member that a controller, now lost, has compared."""
    return score.reward is not None and score.unscored is not None


def _finished(command: CompareGroup, score: Scored | None) -> Finished | None:
    if score is None or score.unscored is None or not _is_open(score):
        return None
    return finished_attempt(score.trajectory_id, score.attempt, command.task, score.unscored)


def _score(
    score: Scored,
    number: int,
    asked: Mapping[str, JudgeComparisons],
    members: Sequence[Finished | None],
    rewards: DomainRewards,
) -> Scored:
    """Return the score of member `number` after the comparisons."""
    components, failed = dict(score.rewards), []
    for name, one in asked.items():
        share = share_of_wins(points for _, points in one.of(number))
        if share is None:
            failed.append(name)
        else:
            components[name] = share
    unscored = score.unscored
    assert unscored is not None, "it has what the missing rewards are computed from"
    reason, errors = StopReason.REWARD_UNAVAILABLE, [str(asked[name].errors[0]) for name in failed]
    if not failed:
        try:
            computed = rewards.weighted(components)
        except MissingRewardsError as error:
            reason, errors = error.reason, [str(error)]
        else:
            return msgspec.structs.replace(
                score, reward=computed.reward, rewards=components, unscored=None
            )
    comparisons = tuple(
        Comparison(
            reward=name,
            opponent=opponent.trajectory_id,
            attempt=opponent.attempt,
            conversation=opponent.conversation,
            points=points,
        )
        for name in failed
        for other, points in asked[name].of(number)
        if (opponent := members[other]) is not None
    )
    return msgspec.structs.replace(
        score,
        reward=None,
        success=None,
        stop_reason=reason,
        blame=BLAME_OF[reason],
        error="; ".join(errors),
        rewards=components,
        unscored=msgspec.structs.replace(unscored, missing=tuple(failed), comparisons=comparisons),
    )


async def repeat_comparisons(
    domain: DomainRewards, finished: Finished, comparisons: Sequence[Comparison]
) -> dict[str, float]:
    """Ask again for the comparisons of an attempt that failed, and return its shares of
    wins by the judges.

    Raises MissingRewardsError.
    """
    by_judge: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        by_judge.setdefault(comparison.reward, []).append(comparison)
    shares: dict[str, float] = {}
    for name, repeated in by_judge.items():
        judge = domain.judges.get(name)
        if judge is None:
            text = f"the run has no pairwise judge {name} any longer"
            raise MissingRewardsError(StopReason.REWARD_ERROR, text, known={}, missing=(name,))
        results = await asyncio.gather(
            *(_repeat(judge, finished, one) for one in repeated), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        share = share_of_wins(result if isinstance(result, float) else None for result in results)
        if share is None:
            raise errors[0]
        shares[name] = share
    return shares


async def _repeat(judge: PairwiseJudge, finished: Finished, comparison: Comparison) -> float:
    if comparison.points is not None:
        return comparison.points
    opponent = msgspec.structs.replace(
        finished,
        trajectory_id=comparison.opponent,
        attempt=comparison.attempt,
        conversation=comparison.conversation,
    )
    return await judge.compare(finished, opponent)
