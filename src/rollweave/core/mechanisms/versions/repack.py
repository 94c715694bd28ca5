"""Choose which replicas hand all their trajectories to replicas with the same weights,
to be free for new weights (Laminar §5.2, Alg. 1).

Decoding few sequences takes an engine nearly as long as decoding many, so the long
tails of several replicas are consolidated on few. Algorithm 1 uses a replica's load
from before the plan, so it can empty a replica that has just received work, and
overfill the next (loads of 0.30, 0.35 and 0.40 put 1.05 on one replica). Here received
work moves along with its receiver, and the plan names where each replica's work ends
up.

Invariants of a plan: moves are between replicas of one publication; a source moves
once, with all its work; no target is a source; after all moves each target holds at
most `kv_max` of its KV and `batch_max` requests, and no more than its slots.
"""

from collections.abc import Sequence

from rollweave.core.mechanisms.costs.interference import step_times
from rollweave.schema.base import EngineId, Struct
from rollweave.schema.events import StepTime

KV_MAX = 0.99
"""Share of a replica's KV that counts as full (Laminar's C_max)."""

SLOWER = 2.0
"""Maximum ratio of a step's time to the time of a step with one sequence. Measured
steps have a fixed part and a part per sequence; the two are equal at the roofline's
ridge, and a full engine's steps are longer still. (For the simulated engines, by
published figures of an H800, B is then 288, 222 and 211 for Laminar's three sizes; the
ratio of weights to compute alone gives about 250.)
"""


class Replica(Struct, frozen=True, kw_only=True):
    """An engine with trajectories in flight, with the weights `publication_id`.
    `requests` counts all its trajectories, including trajectories at their tools or
    waiting. They use `kv_used` of `kv_total` tokens. `kv_before` is the highest use of
    all earlier checks since it took these weights (0 at the first): once use has
    fallen, what is left is the tail, whose contexts still grow. (Algorithm 1 compares
    with the last check alone, which mistakes a tail that grows between two ends for a
    replica that fills up.)
    """

    id: EngineId
    publication_id: int
    kv_used: int
    kv_before: int
    kv_total: int
    requests: int
    slots: int


class Move(Struct, frozen=True, kw_only=True):
    """All trajectories of `source` go to `target`; `source` is then free to take new
    weights.
    """

    source: EngineId
    target: EngineId


def repack(replicas: Sequence[Replica], *, batch_max: int, kv_max: float = KV_MAX) -> list[Move]:
    """Return the plan, in the order of the replicas. Best fit: the least loaded replica
    moves to the target that it fills the most.

    Candidates have work, a KV use below `kv_max` that is not rising, and fewer requests
    than both `batch_max` and slots; a replica without work is free already. Raises
    ValueError for a repeated id and for invalid bounds.
    """
    if not 0 < kv_max <= 1:
        raise ValueError(f"kv_max must be above 0 and at most 1, got {kv_max}")
    if batch_max < 1:
        raise ValueError(f"batch_max must be at least 1, got {batch_max}")
    ids = [replica.id for replica in replicas]
    if len(set(ids)) < len(ids):
        raise ValueError(f"replicas must each be named once, got {ids}")
    final: dict[EngineId, EngineId] = {}
    for publication_id in dict.fromkeys(replica.publication_id for replica in replicas):
        group = [
            replica
            for replica in replicas
            if replica.publication_id == publication_id
            and _is_candidate(replica, batch_max, kv_max)
        ]
        final |= _merged(group, batch_max, kv_max)
    return [
        Move(source=source, target=final[source])
        for source in ids
        if final.get(source, source) != source
    ]


def batch_bound(profile: Sequence[StepTime], *, largest: int, slower: float = SLOWER) -> int:
    """Return B: the largest batch up to `largest` whose step takes at most `slower`
    times as long as a step with one sequence. Laminar takes B from the roofline, where
    decoding turns from memory-bound into compute-bound: before that point, a step
    mostly reads the weights, for any number of sequences. Here B is read off measured
    step times, smoothed (`step_times`), at the shortest measured context; a longer
    context costs memory, which `kv_max` bounds. An engine without a profile has no such
    bound: `largest`. Raises ValueError for an invalid bound.
    """
    if largest < 1:
        raise ValueError(f"largest must be at least 1, got {largest}")
    if slower < 1:
        raise ValueError(f"slower must be at least 1, got {slower}")
    if not profile:
        return largest
    shortest = min(point.context for point in profile)
    points = [point for point in profile if point.context == shortest]
    reach = largest if len({point.batch for point in points}) > 1 else min(largest, points[0].batch)
    step_s = step_times(points, largest=reach)
    return max(1, int(step_s.searchsorted(slower * step_s[0], side="right")))


def _is_candidate(replica: Replica, batch_max: int, kv_max: float) -> bool:
    falling = replica.kv_used <= replica.kv_before and replica.kv_used < kv_max * replica.kv_total
    return falling and 0 < replica.requests < batch_max and replica.requests <= replica.slots


class _Load:
    """The planned load of a replica, and the replicas from which the load comes."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.kv = replica.kv_used
        self.requests = replica.requests
        self.members = [replica.id]

    def fits(self, other: "_Load", batch_max: int, kv_max: float) -> bool:
        requests = self.requests + other.requests
        room = self.kv + other.kv <= kv_max * self.replica.kv_total
        return room and requests <= min(batch_max, self.replica.slots)

    def filled_by(self, other: "_Load") -> float:
        return (self.kv + other.kv) / self.replica.kv_total


def _merged(group: Sequence[Replica], batch_max: int, kv_max: float) -> dict[EngineId, EngineId]:
    """Return where each replica's work ends up: on the replica itself or on another
    replica.
    """
    loads = [_Load(replica) for replica in sorted(group, key=lambda replica: replica.kv_used)]
    kept: list[_Load] = []
    while loads:
        source = loads.pop(0)
        targets = [load for load in (*kept, *loads) if load.fits(source, batch_max, kv_max)]
        if not targets:
            kept.append(source)
            continue
        best = max(targets, key=lambda load: load.filled_by(source))
        best.kv += source.kv
        best.requests += source.requests
        best.members += source.members
    return {member: load.replica.id for load in kept for member in load.members}
