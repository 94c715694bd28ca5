"""The rewards of a run beside those of its environments, and their weighted sum.

The rewards of an attempt are computed in EVAL, in the process that runs it; the rewards
by pairwise judges when the members of its group are compared, in the controller
(`Comparisons`). The core says which members are compared
(`core/mechanisms/comparison`).

Invariants: everything that is asked about an attempt or a group is asked together, and
one wait delays no other; a reward that fails leaves a reason and an error, never a
number, and what was computed of the others. Each group whose comparison is begun and
not cancelled ends with one `GroupCompared`, after the new scores of all its members are
in the store, in one record, so that a group is compared or not when the controller is
lost; a member without a reward keeps what it would be computed from, so that `rollweave
rescore` can ask again.
"""

import asyncio
import functools
import math
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import msgspec

from rollweave.core.policy.comparison import points, share_of_wins
from rollweave.envs.boundary import LARGEST_REWARD
from rollweave.envs.threads import EnvThreads
from rollweave.io.loop_thread import run_apart
from rollweave.record.store import Scored, TrajectoryStore
from rollweave.rollout.driver import EpisodeStopError, Spans, SpawnTask
from rollweave.rollout.reward_sources import Finished, Source, finished_attempt, source_of
from rollweave.schema.base import GroupId, Struct, TaskId, TrajectoryId, as_json
from rollweave.schema.chat import Message
from rollweave.schema.commands import CancelComparison, CompareGroup
from rollweave.schema.config.rollout import ENV_REWARD, RewardConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import Event, GroupCompared
from rollweave.schema.rollouts import ServiceWait
from rollweave.schema.work import BLAME_OF, Comparison, StopReason, Task

T = TypeVar("T")

Record = Callable[[str, float, float], None]
"""Records a span of the trace: its name, its start and its end."""

Result = float | EpisodeStopError
"""A reward, or why there is none."""

Opponents = list[tuple[int, Result]]
"""The numbers of a member's opponents, with its points against each."""

FORGOTTEN = "a member's conversation is not in the store"
"""Error of a comparison with a member that is not kept."""


class Outcome(Struct, frozen=True, kw_only=True):
    """The reward of an attempt: the weighted sum of `components`, which are unweighted
    and have names. None if some failed, which are `missing`, for `reason`.
    """

    components: dict[str, float]
    reward: float | None = None
    missing: tuple[str, ...] = ()
    reason: StopReason = StopReason.FINISHED
    error: str = ""


async def results_of(asked: Iterable[Awaitable[float]]) -> list[Result]:
    """Wait for all that is asked. An error that is no failure of a reward is raised."""
    results: list[Result] = []
    for result in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, EpisodeStopError):
            raise result
        results.append(result)
    return results


async def compare(judge: Source, one: Finished | None, other: Finished | None) -> float:
    """Return the points of `one` against `other`: 1 if it wins in both orders, so that
    a preference of the judge for a place cancels, and 0.5 for ties and for verdicts
    that contradict each other.

    Raises EpisodeStopError if either order has no verdict: that is no defeat.
    """
    if one is None or other is None:
        raise EpisodeStopError(StopReason.REWARD_ERROR, FORGOTTEN)
    verdicts = []
    for verdict in await results_of((judge.reward(one, other), judge.reward(other, one))):
        if isinstance(verdict, EpisodeStopError):
            raise verdict
        verdicts.append(verdict)
    return points(verdicts[0], 1.0 - verdicts[1])


def share(results: Sequence[Result]) -> Result:
    """Return a member's share of wins, of the points in its comparisons by a judge."""
    won = (None if isinstance(one, EpisodeStopError) else one for one in results)
    if (known := share_of_wins(won)) is not None:
        return known
    errors = [str(one) for one in results if isinstance(one, EpisodeStopError)]
    error = errors[0] if errors else "the attempt has no opponent in its group"
    return EpisodeStopError(StopReason.REWARD_UNAVAILABLE, error)


class DomainRewards:
    """The rewards of a task domain, of which `sources` has those of the run by name.
    `judges` are its pairwise judges.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        sources: Mapping[str, Source],
        *,
        env_weight: float,
        clock: Callable[[], float],
    ) -> None:
        self._sources = {one.name: sources[one.name] for one in rewards if not one.pairwise}
        self.judges = {one.name: sources[one.name] for one in rewards if one.pairwise}
        self._weights = {ENV_REWARD: env_weight, **{one.name: one.weight for one in rewards}}
        self._clock = clock

    async def compute(
        self,
        finished: Finished,
        *,
        known: Mapping[str, float] = MappingProxyType({}),
        comparisons: Sequence[Comparison] = (),
        compared: bool = False,
        record: Record | None = None,
    ) -> Outcome:
        """Return the reward of an attempt. Its `known` components are not computed
        again, and its `comparisons` without points are repeated.

        If it is `compared` with its group, all judges must have judged it; otherwise
        the sum is without them. `record` receives a span for each that is computed.
        """
        components = {ENV_REWARD: finished.reward, **known}
        judged = await self._repeat(finished, comparisons)
        for name in self.judges if compared else ():
            if name not in components and name not in judged:
                text = f"reward {name}: the attempt was never compared with its group"
                judged[name] = EpisodeStopError(StopReason.REWARD_UNAVAILABLE, text)
        if any(isinstance(result, EpisodeStopError) for result in judged.values()):
            return self.outcome(components, judged)
        asked = [name for name in self._sources if name not in components]
        results = await results_of(
            self._timed(f"reward {name}", self._sources[name].reward(finished), record)
            for name in asked
        )
        return self.outcome(components, {**judged, **dict(zip(asked, results, strict=True))})

    async def compare(
        self,
        members: Sequence[Finished | None],
        pairs: Sequence[tuple[int, int]],
        *,
        record: Record | None = None,
    ) -> dict[str, list[Opponents]]:
        """Have each judge compare the members of a group, and return each member's
        opponents. None is a member that is not kept. `record` receives a span for each
        judge.
        """

        async def ask(judge: Source) -> list[Opponents]:
            asked = (compare(judge, members[one], members[two]) for one, two in pairs)
            opponents: list[Opponents] = [[] for _ in members]
            for (one, two), result in zip(pairs, await results_of(asked), strict=True):
                lost = result if isinstance(result, EpisodeStopError) else 1.0 - result
                opponents[one].append((two, result))
                opponents[two].append((one, lost))
            return opponents

        asked = (
            self._timed(f"reward {name}", ask(judge), record) for name, judge in self.judges.items()
        )
        return dict(zip(self.judges, await asyncio.gather(*asked), strict=True))

    async def _repeat(
        self, finished: Finished, comparisons: Sequence[Comparison]
    ) -> dict[str, Result]:
        """Repeat the comparisons of an attempt that failed, and return its shares of
        wins by the judges.
        """
        judged: dict[str, Result] = {}
        for name in {one.reward: None for one in comparisons}:
            judge = self.judges.get(name)
            if judge is None:
                text = f"the run has no pairwise judge {name} any longer"
                judged[name] = EpisodeStopError(StopReason.REWARD_ERROR, text)
                continue
            own = [one for one in comparisons if one.reward == name]
            judged[name] = share(await results_of(_repeated(judge, finished, one) for one in own))
        return judged

    async def _timed(self, name: str, asked: Awaitable[T], record: Record | None) -> T:
        started = self._clock()
        try:
            return await asked
        finally:
            if record is not None:
                record(name, started, self._clock())

    def outcome(self, known: Mapping[str, float], results: Mapping[str, Result]) -> Outcome:
        """Return the reward of an attempt, of whose components some were `known` before
        the others had these results.
        """
        components, failed = dict(known), dict[str, EpisodeStopError]()
        for name, result in results.items():
            if isinstance(result, EpisodeStopError):
                failed[name] = result
            else:
                components[name] = result
        if failed:
            reasons = [error.reason for error in failed.values()]
            unavailable = StopReason.REWARD_UNAVAILABLE in reasons
            return Outcome(
                components=components,
                missing=tuple(failed),
                reason=StopReason.REWARD_UNAVAILABLE if unavailable else reasons[0],
                error="; ".join(map(str, failed.values())),
            )
        weights = self._weights.items()
        reward = math.fsum(
            weight * components[name] for name, weight in weights if name in components
        )
        if abs(reward) <= LARGEST_REWARD:
            return Outcome(components=components, reward=reward)
        return Outcome(
            components=components,
            reason=StopReason.REWARD_ERROR,
            error=f"the weighted sum of rewards must be at most {LARGEST_REWARD:g}, got {reward:g}",
        )


async def _repeated(judge: Source, finished: Finished, comparison: Comparison) -> float:
    if comparison.points is not None:
        return comparison.points
    opponent = msgspec.structs.replace(
        finished,
        trajectory_id=comparison.opponent,
        attempt=comparison.attempt,
        conversation=comparison.conversation,
    )
    return await compare(judge, finished, opponent)


class Rewards:
    """The rewards of a run, in one of its processes. `run_id` tells its requests from
    those of other runs, and `threads` are those of its environments. Services that have
    not answered yet are given `start_s`. `deployed` has the URLs of the functions that
    the run has deployed, by the names of their rewards.
    """

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        *,
        threads: EnvThreads,
        clock: Callable[[], float],
        start_s: float = 0.0,
        deployed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Raises ConfigError for a token or rubric that cannot be read."""
        self._sources: dict[str, Source] = {
            one.name: source_of(
                one,
                run_id=run_id,
                threads=threads,
                clock=clock,
                start_s=start_s,
                deployed=deployed.get(one.name),
            )
            for one in config.rewards
        }
        self._domains = {
            task.name: DomainRewards(
                rewards, self._sources, env_weight=task.env_weight, clock=clock
            )
            for task in config.tasks
            if (rewards := config.rewards_of(task.name))
        }

    def of(self, domain: str) -> DomainRewards | None:
        """Return the rewards of a task domain; None if its environment's is the only
        one.
        """
        return self._domains.get(domain)

    def waits(self) -> tuple[ServiceWait, ...]:
        """Return the waits for services."""
        waits = (one.wait() for one in self._sources.values())
        return tuple(wait for wait in waits if wait is not None)

    async def close(self) -> None:
        """Close all connections."""
        for one in self._sources.values():
            await one.close()


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


QUESTION = Message(role="user", content="What is 2 + 2?")

ANSWERS = "4", "5"
"""Answers of the invented attempts. A pairwise judge compares both."""


def check_reward(reward: RewardConfig, *, domain: str, limit_s: float) -> float:
    """Ask a URL or judge for the reward of an invented attempt, within `limit_s`, and
    return it.

    Raises ConfigError for a token or rubric that cannot be read, and EpisodeStopError
    if there is no reward.
    """
    brief = reward.model_copy(update={"timeout_s": min(limit_s, reward.timeout_s)})
    key = reward.judge.reference if reward.judge is not None else None
    payload = as_json({} if key is None else {key: "4"}).decode()
    right, wrong = (
        Finished(
            trajectory_id=TrajectoryId(f"dry-run.{number}"),
            attempt=0,
            task=Task(id=TaskId("dry-run"), env="", seed=0, tag=domain, payload=payload),
            conversation=(QUESTION, Message(role="assistant", content=answer)),
            reward=0.0,
            success=None,
            stop_reason=StopReason.FINISHED,
        )
        for number, answer in enumerate(ANSWERS)
    )
    run_id = f"dry-run-{uuid.uuid4().hex}"

    async def ask() -> float:
        clock = asyncio.get_running_loop().time
        source = source_of(brief, run_id=run_id, threads=EnvThreads(), clock=clock)
        try:
            return await (compare(source, right, wrong) if brief.pairwise else source.reward(right))
        finally:
            await source.close()

    return run_apart(ask())
