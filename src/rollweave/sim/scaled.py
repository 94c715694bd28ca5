"""Costs and workloads that take a multiple of their time: to ask what a faster part
would change, and what processes lose that share cores.
"""

from collections.abc import Mapping

import msgspec

from rollweave.schema.base import Struct
from rollweave.sim.cost import EngineCosts, TrainerCosts
from rollweave.sim.workload import Plan, Workload
from rollweave.sim.world import Costs


class Factors(Struct, frozen=True, kw_only=True):
    """Multiples of the time that each part takes: engine steps, training steps, the
    transfer of weights, and environments with rewards.
    """

    engines: float = 1.0
    trainer: float = 1.0
    weights: float = 1.0
    environment: float = 1.0


def scaled(costs: Costs, factors: Factors) -> Costs:
    """Return these costs, multiplied."""
    engines, trainer = costs
    return (
        {key: ScaledEngine(cost, factors.engines) for key, cost in engines.items()},
        ScaledTrainer(trainer, step=factors.trainer, weights=factors.weights),
    )


def scaled_work(work: Mapping[str, Workload], factors: Factors) -> dict[str, Workload]:
    """Return these workloads, whose environments and rewards take longer."""
    return {name: ScaledWork(one, factors.environment) for name, one in work.items()}


class ScaledEngine:
    """An engine whose steps take `factor` times as long."""

    def __init__(self, cost: EngineCosts, factor: float) -> None:
        self._cost, self._factor = cost, factor
        self.kv_tokens = cost.kv_tokens

    def step_s(
        self, *, prefill_tokens: int, prefill_context: int, decode: int, decode_context: int
    ) -> float:
        """See `EngineCosts`."""
        return self._factor * self._cost.step_s(
            prefill_tokens=prefill_tokens,
            prefill_context=prefill_context,
            decode=decode,
            decode_context=decode_context,
        )

    def move_s(self, tokens: int) -> float:
        """See `EngineCosts`."""
        return self._factor * self._cost.move_s(tokens)

    def decode_s(self, *, decode: int, decode_context: int, steps: int) -> float:
        """See `EngineCosts`."""
        return self._factor * self._cost.decode_s(
            decode=decode, decode_context=decode_context, steps=steps
        )


class ScaledTrainer:
    """A trainer whose steps take `step` times as long, and its weights `weights` times.

    See `TrainerCosts` for all methods.
    """

    def __init__(self, cost: TrainerCosts, *, step: float, weights: float) -> None:
        self._cost, self._step, self._weights = cost, step, weights

    def step_s(self, *, tokens: int, context: int) -> float:
        return self._step * self._cost.step_s(tokens=tokens, context=context)

    def publish_s(self) -> float:
        return self._weights * self._cost.publish_s()

    def load_s(self, *, engines: int, tp: int) -> float:
        return self._weights * self._cost.load_s(engines=engines, tp=tp)

    def hop_s(self, *, share: float) -> float:
        return self._weights * self._cost.hop_s(share=share)

    def lag_s(self) -> float:
        return self._weights * self._cost.lag_s()

    def beside_s(self, *, engines: int, tp: int) -> float:
        return self._weights * self._cost.beside_s(engines=engines, tp=tp)

    def swap_s(self, *, engines: int, tp: int) -> float:
        return self._weights * self._cost.swap_s(engines=engines, tp=tp)

    def copy_s(self) -> float:
        return self._cost.copy_s()

    def checkpoint_s(self) -> float:
        return self._cost.checkpoint_s()

    def saved_s(self, *, engines: int) -> float:
        return self._cost.saved_s(engines=engines)


class ScaledWork:
    """A workload whose environments, their starts and rewards take `factor` times as
    long.
    """

    def __init__(self, work: Workload, factor: float) -> None:
        self._work, self._factor = work, factor

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        plan = self._work.plan(index=index, member=member, attempt=attempt, seed=seed)
        turns = tuple(
            msgspec.structs.replace(turn, env_s=self._factor * turn.env_s) for turn in plan.turns
        )
        return msgspec.structs.replace(
            plan,
            init_s=self._factor * plan.init_s,
            reward_s=self._factor * plan.reward_s,
            turns=turns,
        )
