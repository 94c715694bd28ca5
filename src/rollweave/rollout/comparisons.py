"""The comparisons of a group's members by pairwise judges, in the controller.

The core says which members are compared (`core/mechanisms/comparison`). Invariants:
each group whose comparison is begun and not cancelled ends with one `GroupCompared`,
after the new scores of all its members are in the store, in one record, so that a group
is compared or not when the controller is lost; a member without a reward keeps what it
would be computed from, so that `rollweave rescore` can ask again.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rollweave.record.store import Scored, TrajectoryStore
from rollweave.rollout.budget import EpisodeStopError
from rollweave.rollout.reward_sources import Finished, finished_attempt
from rollweave.rollout.rewards import FORGOTTEN, DomainRewards, Opponents, Outcome, share
from rollweave.rollout.turns import Spans
from rollweave.rollout.worker import SpawnTask
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.commands import CancelComparison, CompareGroup
from rollweave.schema.events import Event, GroupCompared
from rollweave.schema.work import BLAME_OF, Comparison


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
        began, judged = self._clock(), dict[str, list[Opponents]]()
        if any(members):
            record = functools.partial(self._spans.episode_span, command.group_id)
            judged = await rewards.compare(members, command.pairs, record=record)
        self._tasks.pop(command.group_id, None)
        compared: list[Scored] = []
        known: dict[TrajectoryId, float] = {}
        errors: dict[str, None] = {}
        for number, (name, score) in enumerate(scores.items()):
            if score is None:
                continue
            if members[number] is not None:
                own = {judge: opponents[number] for judge, opponents in judged.items()}
                shares = {judge: share([result for _, result in met]) for judge, met in own.items()}
                outcome = rewards.outcome(score.rewards, shares)
                failed = {judge: own[judge] for judge in outcome.missing}
                score = rescored(
                    msgspec.structs.replace(score, at=self._clock()),
                    outcome,
                    seconds=self._clock() - began,
                    comparisons=_comparisons(failed, members),
                )
                compared.append(score)
            if score.reward is not None:
                known[name] = score.reward
            else:
                errors[score.error] = None
        if compared:
            self._store.rescore(compared)
        error = "; ".join(errors) or ("" if len(known) == len(scores) else FORGOTTEN)
        self._post(GroupCompared(group_id=command.group_id, rewards=known, error=error))


def _finished(command: CompareGroup, score: Scored | None) -> Finished | None:
    """Return a member that is to be compared; None if it is not kept, or if a
    controller, now lost, has compared it.
    """
    if score is None or score.unscored is None or score.reward is None:
        return None
    return finished_attempt(score.trajectory_id, score.attempt, command.task, score.unscored)


def _comparisons(
    failed: Mapping[str, Opponents], members: Sequence[Finished | None]
) -> tuple[Comparison, ...]:
    """Return what is kept of comparisons: the opponents, by the judges that failed."""
    return tuple(
        Comparison(
            reward=name,
            opponent=opponent.trajectory_id,
            attempt=opponent.attempt,
            conversation=opponent.conversation,
            points=None if isinstance(result, EpisodeStopError) else result,
        )
        for name, opponents in failed.items()
        for other, result in opponents
        if (opponent := members[other]) is not None
    )


def rescored(
    score: Scored, outcome: Outcome, *, seconds: float, comparisons: tuple[Comparison, ...] = ()
) -> Scored:
    """Return an attempt's score after `seconds` in which its missing rewards were
    computed. If some failed, it keeps what they are computed from.
    """
    unscored, reward = score.unscored, outcome.reward
    assert unscored is not None, "it has what the missing rewards are computed from"
    reason = unscored.stop_reason if reward is not None else outcome.reason
    kept = msgspec.structs.replace(unscored, missing=outcome.missing, comparisons=comparisons)
    return msgspec.structs.replace(
        score,
        reward=reward,
        success=unscored.success if reward is not None else None,
        stop_reason=reason,
        blame=BLAME_OF[reason],
        eval_s=score.eval_s + seconds,
        error=outcome.error,
        rewards=outcome.components,
        unscored=None if reward is not None else kept,
    )
