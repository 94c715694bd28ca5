"""The rewards of a run beside those of its environments, and their weighted sum.

Those of an attempt are computed in EVAL, in the process that runs it, all at once.
Invariants: one attempt's wait delays no other; a reward that fails leaves an error with
a reason, and what was computed of the others.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from rollweave.envs.boundary import LARGEST_REWARD
from rollweave.envs.threads import EnvThreads
from rollweave.rollout.budget import EpisodeStopError
from rollweave.rollout.pairwise import PairwiseJudge
from rollweave.rollout.reward_sources import Finished, Source, source_of
from rollweave.schema.base import Struct
from rollweave.schema.config.rewards import ENV_REWARD
from rollweave.schema.config.root import RunConfig
from rollweave.schema.rollouts import ServiceWait
from rollweave.schema.work import StopReason

Record = Callable[[str, float, float], None]
"""Records a span of the trace: its name, its start and its end."""


class Computed(Struct, frozen=True, kw_only=True):
    """The reward of an attempt: the weighted sum of `components`, which are unweighted
    and have names.
    """

    reward: float
    components: dict[str, float]


class MissingRewardsError(EpisodeStopError):
    """Some rewards failed: those that are `missing`; `known` has the others."""

    def __init__(
        self, reason: StopReason, message: str, *, known: dict[str, float], missing: tuple[str, ...]
    ) -> None:
        super().__init__(reason, message)
        self.known, self.missing = known, missing


class DomainRewards:
    """The rewards of a task domain, with their weights, and the weight of its
    environment's. `judges` are its pairwise judges, whose rewards come when the members
    of a group are compared (`rollout/comparisons.py`).
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[float, Source]],
        *,
        judges: Mapping[str, tuple[float, PairwiseJudge]],
        env_weight: float,
        clock: Callable[[], float],
    ) -> None:
        self._sources, self._clock = sources, clock
        self.judges = {name: judge for name, (_, judge) in judges.items()}
        self._weights = {
            ENV_REWARD: env_weight,
            **{name: weight for name, (weight, _) in (*sources.items(), *judges.items())},
        }

    async def compute(
        self,
        finished: Finished,
        *,
        known: Mapping[str, float] | None = None,
        compared: bool = False,
        record: Record | None = None,
    ) -> Computed:
        """Return the reward; what is `known` of its components is not computed again.
        If the attempt is `compared`, those of the judges must be among them; otherwise
        the sum is without them. `record` receives a span for each that is computed.

        Raises MissingRewardsError.
        """
        components = {ENV_REWARD: finished.reward, **(known or {})}
        if compared:
            self._check_compared(components)
        asked = [name for name in self._sources if name not in components]
        results = await asyncio.gather(
            *(self._one(name, finished, record) for name in asked), return_exceptions=True
        )
        failed: dict[str, EpisodeStopError] = {}
        for name, result in zip(asked, results, strict=True):
            if isinstance(result, EpisodeStopError):
                failed[name] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                components[name] = result
        if not failed:
            return self._weighted(components)
        reasons = [error.reason for error in failed.values()]
        unavailable = StopReason.REWARD_UNAVAILABLE in reasons
        raise MissingRewardsError(
            StopReason.REWARD_UNAVAILABLE if unavailable else reasons[0],
            "; ".join(map(str, failed.values())),
            known=components,
            missing=tuple(failed),
        )

    async def _one(self, name: str, finished: Finished, record: Record | None) -> float:
        started = self._clock()
        try:
            return await self._sources[name][1].reward(finished)
        finally:
            if record is not None:
                record(f"reward {name}", started, self._clock())

    def weighted(self, components: dict[str, float]) -> Computed:
        """Return the weighted sum of the components of an attempt that was compared.
        Raises MissingRewardsError for a judge without one, or a sum that is too large.
        """
        self._check_compared(components)
        return self._weighted(components)

    def _check_compared(self, components: dict[str, float]) -> None:
        if missing := tuple(name for name in self.judges if name not in components):
            raise MissingRewardsError(
                StopReason.REWARD_UNAVAILABLE,
                f"reward {', '.join(missing)}: the attempt was never compared with its group",
                known=components,
                missing=missing,
            )

    def _weighted(self, components: dict[str, float]) -> Computed:
        weights = self._weights
        known = [name for name in weights if name in components]
        reward = math.fsum(weights[name] * components[name] for name in known)
        if not abs(reward) <= LARGEST_REWARD:
            raise MissingRewardsError(
                StopReason.REWARD_ERROR,
                f"the weighted sum of rewards must be at most {LARGEST_REWARD:g}, got {reward:g}",
                known=components,
                missing=(),
            )
        return Computed(reward=reward, components=components)


class Rewards:
    """The rewards of a run, in one of its processes. `run_id` tells its requests from
    those of other runs, and `threads` are those of its environments. Services that have
    not answered yet are given `start_s`. `deployed` has the
    URLs of the functions that the run has deployed, by the names of their rewards.
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
            if not one.pairwise
        }
        self._judges = {
            one.name: PairwiseJudge(one, run_id=run_id, clock=clock, start_s=start_s)
            for one in config.rewards
            if one.pairwise
        }
        self._domains = {
            task.name: DomainRewards(
                {o.name: (o.weight, self._sources[o.name]) for o in rewards if not o.pairwise},
                judges={o.name: (o.weight, self._judges[o.name]) for o in rewards if o.pairwise},
                env_weight=task.env_weight,
                clock=clock,
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
        waits = (one.wait() for one in self._all())
        return tuple(wait for wait in waits if wait is not None)

    async def close(self) -> None:
        """Close all connections."""
        for one in self._all():
            await one.close()

    def _all(self) -> tuple[Source | PairwiseJudge, ...]:
        return *self._sources.values(), *self._judges.values()
