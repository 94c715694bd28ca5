"""Ways to split GPUs between trainer and engines, in each mode, and the choice among
them by their predicted speeds (RollArt §8 chooses a ratio of 1:5 and a bound of one by
hand).

A prediction costs as much as the steps that were simulated for it, so candidates are
dropped in rounds: all are screened by a closed form, few are simulated briefly, fewer
longer (successive halving). Modes differ in what they train on, not in speed alone:
every mode keeps its best candidate until the last round, and the best candidate of
mode sync is always among the answers.

Invariants: equal arguments give equal choices, in any order of the candidates; no
candidate is chosen twice.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from msgspec import structs

from rollweave.schema.base import Struct
from rollweave.schema.config.engines import EnginePhase
from rollweave.schema.config.rollout import ModeName

MACHINE = 8
"""Number of GPUs of a machine: more GPUs than these train on whole machines."""

DEGREES = (1, 2, 4, 8)
"""Numbers of GPUs that share an engine: within a machine."""

TRAINERS = (1, 2, 4, 6, 8)
"""Numbers of GPUs of a machine that train together."""

PREFILL_SHARES = (0.25, 0.5, 0.75)
"""Shares of a pool's engines that compute prompts for the others: RollArt Table 5 has
one to three of four nodes.
"""

MOST_SPLITS = 5
"""Maximum number of ways to divide a pool's GPUs that are compared, spread evenly over
all.
"""

LISTED_PER_PACING = 2
"""Maximum number of answers with the same mode and bound, so that others are seen."""

FULL_KV = 0.8
"""Share of KV caches in use from which they limit engines: turns of changing lengths
fill no cache entirely.
"""

WAITS = ("environment", "stragglers", "reward", "weights")
"""Causes for which engines wait, other than the trainer."""


class Pacing(Struct, frozen=True, kw_only=True, order=True):
    """A mode, and its bound `rollout.alpha` (0 for modes without this setting)."""

    mode: ModeName
    alpha: int = 0


class EngineGroup(Struct, frozen=True, kw_only=True, order=True):
    """Equal engines of `degree` GPUs each in a pool, for both parts of turns or one."""

    pool: str
    count: int
    degree: int
    phase: EnginePhase = "both"

    @property
    def gpus(self) -> int:
        return self.count * self.degree


class Split(Struct, frozen=True, kw_only=True, order=True):
    """`trainer` GPUs of `pool` train, and the engines have all others; with `colocated`
    engines and trainer take turns on the same ones.
    """

    pool: str
    trainer: int
    engines: tuple[EngineGroup, ...]
    colocated: bool = False

    def gpus_of(self, pool: str) -> int:
        """Return the number of GPUs of a pool that are used."""
        engines = sum(group.gpus for group in self.engines if group.pool == pool)
        return engines + (self.trainer if pool == self.pool and not self.colocated else 0)


class Candidate(Struct, frozen=True, kw_only=True, order=True):
    split: Split
    pacing: Pacing

    @property
    def synchronous(self) -> bool:
        return self.pacing.mode is ModeName.SYNC


class Prediction(Struct, frozen=True, kw_only=True):
    """A simulation's figures in its steady state.

    A step takes `step_s` seconds and trains `step_tokens` tokens, prompts and
    observations included, both as means over the same steps. `engines` and `trainer`
    are shares of their time by what they did or waited for,
    `staleness` the mean number of steps between launch and training, `dropped` the
    share of the started trajectories that were not trained on, `kv_used` the share of
    KV caches in use. Of several seeds, `step_s` is the mean, and `fastest_s` to
    `slowest_s` their range.
    """

    step_s: float
    step_tokens: float
    staleness: float
    stalest: int
    engines: dict[str, float]
    trainer: dict[str, float]
    kv_used: float
    dropped: float
    fastest_s: float
    slowest_s: float

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second: those of a step over its seconds."""
        return self.step_tokens / max(1e-9, self.step_s)


Predictions = Mapping[Candidate, Prediction]


def splits(
    pools: Mapping[str, int],
    degrees: Mapping[str, Sequence[int]],
    least: Mapping[str, int],
) -> list[Split]:
    """Return the ways to divide the GPUs of the pools, by name and number.

    Each pool's engines have one of its `degrees`; pools with none have no engines. The
    trainer has at least `least` GPUs of one pool, of those in `least`. Engines use all
    GPUs that the trainer leaves, as far as their degree divides these.
    """
    divisions = []
    for pool, fewest in sorted(least.items()):
        spare = int(len(pools) == 1)  # for an engine
        for trainer in trainer_counts(pools[pool] - spare, fewest):
            left = {name: gpus - trainer * (name == pool) for name, gpus in sorted(pools.items())}
            for degree in DEGREES:
                groups = tuple(
                    EngineGroup(pool=name, count=gpus // fitting, degree=fitting)
                    for name, gpus in left.items()
                    if (fitting := _fitting(degree, degrees.get(name, ()), gpus))
                )
                if any(group.degree == degree for group in groups):
                    divisions.append(Split(pool=pool, trainer=trainer, engines=groups))
    if len(pools) == 1:
        ((pool, gpus),) = pools.items()
        if least.get(pool, gpus + 1) <= gpus:
            divisions += [
                Split(
                    pool=pool,
                    trainer=gpus,
                    engines=(EngineGroup(pool=pool, count=gpus // degree, degree=degree),),
                    colocated=True,
                )
                for degree in degrees.get(pool, ())
                if gpus % degree == 0
            ]
    return sorted(set(divisions))


def _fitting(degree: int, degrees: Sequence[int], gpus: int) -> int:
    """Return the degree nearest to `degree` of those that divide these GPUs; 0 if none
    does.
    """
    possible = [one for one in degrees if gpus >= one and gpus % one == 0]
    return min(possible, key=lambda one: (abs(one - degree), one), default=0)


def divided(split: Split) -> list[Split]:
    """Return the ways in which some engines of a split compute prompts for the others
    (RollArt §6.3): a share of the engines of one pool, or those of one pool of several.
    Engines in turn with the trainer are not divided.
    """
    if split.colocated:
        return []
    if len(split.engines) > 1:
        return [
            structs.replace(
                split,
                engines=tuple(
                    structs.replace(group, phase="prefill" if group == prefill else "decode")
                    for group in split.engines
                ),
            )
            for prefill in split.engines
        ]
    (group,) = split.engines
    counts = sorted({max(1, round(share * group.count)) for share in PREFILL_SHARES})
    return [
        structs.replace(
            split,
            engines=(
                structs.replace(group, count=count, phase="prefill"),
                structs.replace(group, count=group.count - count, phase="decode"),
            ),
        )
        for count in counts
        if count < group.count
    ]


def trainer_counts(gpus: int, least: int) -> list[int]:
    """Return the numbers of GPUs, from `least` to `gpus`, that may train: those of
    `TRAINERS`, whole machines, and all but half a machine.
    """
    counts = [
        count
        for count in range(max(1, least), gpus + 1)
        if count in TRAINERS or count % MACHINE == 0 or count == gpus - MACHINE // 2
    ]
    if len(counts) <= MOST_SPLITS:
        return counts
    last = len(counts) - 1
    return sorted({counts[round(n * last / (MOST_SPLITS - 1))] for n in range(MOST_SPLITS)})


def candidates(choices: Sequence[Split], pacings: Sequence[Pacing]) -> list[Candidate]:
    """Return every split in every pacing; GPUs that take turns only in mode sync."""
    return [
        Candidate(split=split, pacing=pacing)
        for split in choices
        for pacing in sorted(set(pacings))
        if pacing.mode is ModeName.SYNC or not split.colocated
    ]


def screened(estimates: Mapping[Candidate, float], most: int) -> list[Candidate]:
    """Return at most `most` candidates: of each pacing the best by their estimated
    seconds, one after another.
    """
    columns: dict[tuple[Pacing, bool], list[Candidate]] = {}
    for candidate in sorted(estimates, key=lambda one: (estimates[one], one)):
        columns.setdefault((candidate.pacing, candidate.split.colocated), []).append(candidate)
    rows = zip_longest(*(columns[key] for key in sorted(columns)))
    return [candidate for row in rows for candidate in row if candidate is not None][:most]


def survivors(predictions: Predictions, most: int) -> list[Candidate]:
    """Return the fastest `most` candidates, beside the fastest of each pacing."""
    order = fastest_first(predictions)
    first = {candidate.pacing: candidate for candidate in reversed(order)}
    kept = {*order[:most], *first.values()}
    return [candidate for candidate in order if candidate in kept]


def listed(predictions: Predictions, count: int) -> list[Candidate]:
    """Return the fastest `count` candidates, at most two of a pacing, of which one is
    of mode sync if any candidate is.
    """
    order = fastest_first(predictions)
    seen: dict[Pacing, int] = {}
    chosen = []
    for candidate in order:
        seen[candidate.pacing] = seen.get(candidate.pacing, 0) + 1
        if seen[candidate.pacing] <= LISTED_PER_PACING:
            chosen.append(candidate)
    chosen = chosen[:count]
    sync = next((candidate for candidate in order if candidate.synchronous), None)
    if sync is not None and sync not in chosen:
        chosen = [*chosen[: count - 1], sync]
    return chosen


def fastest_first(predictions: Predictions) -> list[Candidate]:
    return sorted(predictions, key=lambda one: (predictions[one].step_s, one))


def limit(prediction: Prediction) -> str:
    """Return what limits a candidate: the activity or wait with the largest share of
    time, of `trainer`, `engines`, `kv` (engines whose KV caches are full) and what
    engines wait for: `environment`, `stragglers`, `reward`, `weights`, `window`.

    Engines that may not run further ahead (`window`) while the trainer works wait for
    the trainer, so this time is the trainer's alone.
    """
    trainer = prediction.trainer.get("busy", 0.0) + prediction.trainer.get("measuring", 0.0)
    shares = {"trainer": trainer, "engines": prediction.engines.get("busy", 0.0)}
    shares |= {cause: prediction.engines.get(cause, 0.0) for cause in WAITS}
    shares["window"] = max(0.0, prediction.engines.get("window", 0.0) - trainer)
    cause = max(shares, key=lambda name: shares[name])
    return "kv" if cause == "engines" and prediction.kv_used >= FULL_KV else cause
