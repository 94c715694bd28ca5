"""The load of a step, as the run has measured it, for the mechanisms that compare
numbers of engines (`core/policy/ratio`).

The counters have the tokens of prompts and of outputs per turn, and `mechanisms/costs`
and `mechanisms/phases` have learned their prices. The attempts under way, and the time
between two turns, are observed here.
"""

from collections.abc import Sequence

import msgspec

from rollweave.core.mechanisms.costs import price, sampling_price
from rollweave.core.mechanisms.costs.rates import Costs, kind_of
from rollweave.core.mechanisms.phases import Phases
from rollweave.core.policy.ratio import Load
from rollweave.core.policy.scheduling import divides, moves_phases
from rollweave.core.policy.turn_times import FIRST_TURNS, estimate
from rollweave.core.run import EngineMove, Mechanism, Run, TurnMove
from rollweave.core.state import Engine, Trajectory, Turn
from rollweave.schema.base import TrajectoryId
from rollweave.schema.events import TurnDone

LEAST_TURNS = 2 * FIRST_TURNS
"""Minimum number of turns of a step whose load is compared."""


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of the run when a step was trained."""

    turns: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    mixed_tokens: int = 0  # of prompts, at engines that sample
    split_tokens: int = 0  # of prompts, at prefill engines
    waited_s: float = 0.0  # for which the trainer waited for trajectories
    answered: int = 0
    attempts: int = 0  # under way, summed over the answered turns
    followed: int = 0  # turns that followed another turn
    between_s: float = 0.0


class Loads(msgspec.Struct):
    """The part of the state."""

    trajectories: dict[TrajectoryId, float] = {}  # → when its last turn was answered
    observed: Counted = Counted()  # the last four of its counts, until now


def requested(run: Run, trajectory: Trajectory, _turn: Turn) -> None:
    """Observe the time since the last turn."""
    part = run.part(Loads)
    answered = part.trajectories.pop(trajectory.id, None)
    if answered is not None:
        part.observed = msgspec.structs.replace(
            part.observed,
            followed=part.observed.followed + 1,
            between_s=part.observed.between_s + run.now - answered,
        )


def done(run: Run, trajectory: Trajectory, _turn: Turn, _engine: Engine, _: TurnDone) -> None:
    """Observe the attempts under way."""
    part = run.part(Loads)
    part.trajectories[trajectory.id] = run.now
    part.observed = msgspec.structs.replace(
        part.observed,
        answered=part.observed.answered + 1,
        attempts=part.observed.attempts + len(run.state.pools.run),
    )


def count(run: Run) -> Counted:
    """Return the totals of the run until now."""
    counters = run.state.counters
    return msgspec.structs.replace(
        run.part(Loads).observed,
        turns=counters.turns,
        output_tokens=counters.output_tokens,
        context_tokens=counters.context_tokens,
        mixed_tokens=counters.context_tokens - counters.cached_tokens,
        split_tokens=counters.scheduling.split_tokens,
        waited_s=run.state.idle.trainer.get("batch", 0.0),
    )


def load_between(
    run: Run, before: Counted, counted: Counted, sampling: Sequence[Engine]
) -> Load | None:
    """Return the load of the turns between two counts at the engines that sample; None
    if it is not known.

    Finished turns tell prompts and outputs apart only if these vary. So the time of a
    prompt beside outputs is at least its time at a prefill engine, without the part
    that steps hide which read the weights anyway.
    """
    turns, answered = counted.turns - before.turns, counted.answered - before.answered
    engine = next(iter(sampling), None)
    if engine is None or min(turns, answered) < LEAST_TURNS:
        return None
    hardware, degree = kind_of(run, engine)
    times = run.part(Costs).turn_times.get(hardware, {}).get(degree)
    if times is None or times.count < FIRST_TURNS:
        return None
    prices = estimate(times.turns)
    mixed_price = sampling_price(run, engine)
    mixed_price = prices.prompt_s if mixed_price is None else mixed_price
    phases = run.part(Phases) if Phases in run.parts else Phases()
    prefill_price = price(phases.prefill.get(hardware, {}).get(degree))
    tokens = (counted.output_tokens - before.output_tokens) / turns
    prompts = (
        counted.mixed_tokens + counted.split_tokens - before.mixed_tokens - before.split_tokens
    ) / turns
    context = (counted.context_tokens - before.context_tokens) / turns + tokens / 2
    followed = counted.followed - before.followed
    attempts = (counted.attempts - before.attempts) / answered
    prompt_s = prompts * (mixed_price if prefill_price is None else prefill_price)
    steps_s = tokens * prices.fixed_s
    # the steps of a batch hide at most as much as they take themselves
    hidden_s = steps_s / max(1.0, attempts / len(sampling))
    return Load(
        attempts=attempts,
        prompt_s=prompt_s,
        mixed_s=max(prompts * mixed_price, prompt_s - hidden_s),
        move_s=prompts * (price(phases.moved) or 0.0),
        steps_s=steps_s,
        sequence_s=tokens * (prices.sequence_s + context * prices.context_s),
        between_s=(counted.between_s - before.between_s) / max(1, followed),
        slots=max(1, engine.abilities.max_slots),
    )


def replaced(run: Run, _former: object) -> None:
    """Forget the attempts of a former world."""
    run.part(Loads).trajectories.clear()


MECHANISM = Mechanism(
    name="load",
    used=lambda config: moves_phases(config) or divides(config),
    state=Loads,
    follows={
        TurnMove.REQUESTED: requested,
        TurnMove.DONE: done,
        EngineMove.REPLACED: replaced,
    },
)
