"""The ratio of prefill to decode engines: which ratio serves the most turns, and
whether a run should move an engine from one side to the other (RollArt §6.3, §9). And
the division of places between engines and ranks of the trainer: which division has the
shortest steps.

A run is a closed network (Little's law): each of K attempts has a turn, whose prompt
waits for a prefill engine and is computed there, or is computed by the engine that
samples; is sampled; and is followed by an environment's step. With X turns a second,

    K = X · (share · (prompt + wait + move) + sampling + between)

    wait      = prompt · ρ^(√(2(p+1)) − 1) / (p · (1 − ρ)),  ρ = X · share · prompt / p
    sampling  = (steps + mixed) / (1 − X · (sequences + mixed) / d)

for p prefill engines (a queue with p servers, by Sakasegawa's approximation) and d
decode engines, which share their steps among their turns. `share` of the prompts are
computed at prefill engines, as many as makes X greatest, since the run decides so turn
by turn (`core/policy/routing`); `mixed` are the others. The estimate is compared only
with estimates of other ratios of the same load, so that errors of scale cancel.

Invariants: with a constant load, engines move finitely often and never to and fro,
since each move goes toward the same best ratio, and none is made from a ratio that is
nearly as good. Whatever the loads, after n steps the direction has changed at most
log2(1 + n / `STEADY`) times, because each change of direction doubles the number of
steps that must agree before the next move.
"""

import math
from collections.abc import Mapping

import msgspec

from rollweave.schema.base import Struct

BAND = 0.05
"""Minimum relative gain of turns per second for which an engine moves: the band within
which two ratios are as good as each other.
"""

STEADY = 3
"""Number of consecutive steps whose loads must ask for the same move."""

HORIZON = 10
"""Maximum number of steps within which a move must earn back its cost."""

PARTS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the prompts at prefill engines that are compared: these parts of their
share of the engines, and this share with these parts of the rest.
"""

ROUNDS = 30
"""Number of bisections: the turns per second are found to a part in 10^9."""

MOST_RATIOS = 17
"""Maximum number of ratios that are compared. With the two numbers above, a comparison
takes about 10 ms.
"""


class Load(Struct, frozen=True, kw_only=True):
    """The load of a step, as the run has measured it: `attempts` under way, and the
    mean seconds of a turn.

    `prompt_s` is its prompt's time at a prefill engine, `move_s` that of the KV's move
    from there, and `mixed_s` the prompt's time at an engine that samples. Sampling
    takes `steps_s` of the steps alone, and `sequence_s` more for each turn of a batch,
    which has at most `slots`. `between_s` passes until the next turn.
    """

    attempts: float
    prompt_s: float
    mixed_s: float
    move_s: float
    steps_s: float
    sequence_s: float
    between_s: float
    slots: int


def turns_per_s(load: Load, prefill: int, decode: int) -> float:
    """Return the estimated turns per second of this many prefill and decode engines; 0
    without decode engines.
    """
    if not decode:
        return 0.0
    even = prefill / (prefill + decode)
    shares = [even * part for part in PARTS] + [even + (1 - even) * part for part in PARTS]
    return max(
        _turns_per_s(load, prefill, decode, share) for share in shares[: None if even else 1]
    )


def _turns_per_s(load: Load, prefill: int, decode: int, share: float) -> float:
    each = load.sequence_s + (1 - share) * load.mixed_s
    alone = load.steps_s + (1 - share) * load.mixed_s
    low, high = 0.0, load.attempts / max(1e-12, alone + share * load.prompt_s)
    for _ in range(ROUNDS):
        rate = (low + high) / 2
        busy, used = (
            share * load.prompt_s * rate / max(1, prefill),
            each * rate / decode,
        )
        possible = busy < 1 and used < 1
        if possible:
            crowd = busy ** (math.sqrt(2 * (prefill + 1)) - 1) / (max(1, prefill) * (1 - busy))
            turn_s = share * (load.prompt_s * (1 + crowd) + load.move_s) + alone / (1 - used)
            possible = (
                rate * (turn_s + load.between_s) <= load.attempts
                and rate * turn_s <= decode * load.slots
            )
        low, high = (rate, high) if possible else (low, rate)
    return low


class Change(Struct, frozen=True, kw_only=True):
    """A move of one engine that a load asks for: `way` is 1 for a decode engine that
    becomes a prefill engine, −1 for the reverse, and 0 for none. It leads toward
    `prefill` prefill engines, with which there would be more turns per second by the
    share `gain`.
    """

    way: int = 0
    prefill: int = 0
    gain: float = 0.0


def change(load: Load, prefill: int, decode: int) -> Change:
    """Return the move toward the best ratio of these engines; none if that gains at
    most `BAND`. The best ratio has at least one decode engine.
    """
    now, best = turns_per_s(load, prefill, decode), best_of(load, prefill + decode)
    gain = turns_per_s(load, best, prefill + decode - best) / now - 1 if now else 0.0
    if gain <= BAND:
        return Change(prefill=prefill)
    return Change(way=1 if best > prefill else -1, prefill=best, gain=gain)


def best_of(load: Load, engines: int) -> int:
    """Return the number of prefill engines among these with the greatest estimate; the
    least among equals. Of many engines, some numbers are tried.
    """
    last = min(engines, MOST_RATIOS) - 1
    tried = [round(number * (engines - 1) / max(1, last)) for number in range(last + 1)]
    return max(tried, key=lambda number: turns_per_s(load, number, engines - number))


def pays(gain: float, *, waited_s: float, engines: int, steps: int, cost_s: float) -> bool:
    """Return whether a move earns back its cost of `cost_s` engine-seconds within the
    next `steps` steps, or `HORIZON` if that is less. In a step, the trainer has waited
    `waited_s` seconds for trajectories of the `engines`, which the gain makes shorter.
    """
    return gain / (1 + gain) * waited_s * engines * min(steps, HORIZON) > cost_s


class Patience(msgspec.Struct):
    """The hysteresis of a ratio: it counts the steps that have asked for the same
    move.
    """

    way: int = 0  # that the last steps ask for
    steps: int = 0  # number of these steps
    last: int = 0  # the way of the last move
    turns: int = 0  # changes of direction so far

    def ask(self, way: int) -> bool:
        """Record that a step asks for a move in this way, or for none (0). Return
        whether an engine should move now.
        """
        self.steps = self.steps + 1 if way == self.way else 1
        self.way = way
        return bool(way) and self.steps >= self.needed(way)

    def needed(self, way: int) -> int:
        """Return the number of steps that must ask for a move in this way."""
        back = self.last == -way
        return STEADY << (self.turns + back)

    def moved(self, way: int) -> None:
        """Record that an engine moves."""
        self.turns += self.last == -way
        self.way, self.steps, self.last = 0, 0, way


# The division of places between engines and ranks of the trainer.


class StepTimes(Struct, frozen=True, kw_only=True):
    """The seconds of a step and of its parts: the whole step took `step_s`. Its batch
    took `rollouts_s` to produce, without the time for which the engines waited for the
    trainer, `training_s` to train, and `other_s` to publish and save.
    """

    step_s: float
    rollouts_s: float
    training_s: float
    other_s: float

    def after(self, rollouts: float, training: float) -> float:
        """Return the estimated seconds of a step whose rollouts take `rollouts` times,
        and whose training takes `training` times as long. The same share of the shorter
        of rollouts and training is hidden beside the longer one as before: none if they
        take turns, and all if the longer one never waits.
        """
        before = (self.rollouts_s, self.training_s + self.other_s)
        now = (rollouts * self.rollouts_s, training * self.training_s + self.other_s)
        hidden = (sum(before) - self.step_s) / max(1e-12, min(before))
        return sum(now) - min(1.0, max(0.0, hidden)) * min(now)


def speed(speeds: Mapping[int, float], ranks: int) -> float:
    """Return the relative speed of so many ranks: a measured speed, or one that is
    proportional to that of the nearest measured number. Without measurements, it is the
    number of ranks.
    """
    nearest = min(speeds, key=lambda known: (abs(known - ranks), known), default=ranks)
    return speeds.get(nearest, float(ranks)) * ranks / nearest


class Division(Struct, frozen=True, kw_only=True):
    """A division of places: `ranks` of the trainer, and engines in all other places.
    Its steps take `step_s` seconds, and there are more steps per second than with the
    present division by the share `gain`.
    """

    ranks: int
    step_s: float
    gain: float = 0.0


def division(
    times: StepTimes,
    load: Load,
    *,
    ranks: int,
    engines: int,
    bounds: tuple[int, int],
    speeds: Mapping[int, float],
) -> Division:
    """Return the best division of the places that `ranks` and `engines` have now, with
    a number of ranks within `bounds`, both inclusive, and at least one engine. It is
    the present division if no other gains more than `BAND`.
    """

    def step_s(number: int) -> float:
        others = turns_per_s(load, 0, ranks + engines - number)
        rollouts = turns_per_s(load, 0, engines) / others if others else math.inf
        return times.after(rollouts, speed(speeds, ranks) / speed(speeds, number))

    lowest, highest = bounds
    tried = range(lowest, min(highest, ranks + engines - 1) + 1)
    now = step_s(ranks)
    best = min(tried, key=lambda number: (step_s(number), abs(number - ranks)), default=ranks)
    gain = now / step_s(best) - 1 if now else 0.0
    return (
        Division(ranks=best, step_s=step_s(best), gain=gain)
        if gain > BAND
        else Division(ranks=ranks, step_s=now)
    )
