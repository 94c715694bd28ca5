"""The changes of the core's counters in one training step. Both worlds write them into
the step's line in `metrics.jsonl`.
"""

from typing import Any

import msgspec

from rollweave.core.mechanisms.cluster.workers import cluster_of, processes
from rollweave.core.mechanisms.pools import pools_of
from rollweave.core.state import State


class CounterSnapshot:
    """The core's counters at one moment. The difference of two snapshots shows what a
    step added.
    """

    def __init__(
        self,
        at: float,
        counts: dict[str, int],
        stops: dict[str, int],
        idle: dict[str, dict[str, float]],
        scheduling: dict[str, float],
        weights: dict[str, float],
        inherent: dict[int, int],
        cut: dict[str, int],
        affinity: dict[str, Any],
        workers: dict[str, float],
    ) -> None:
        self.at, self.counts, self.stops, self.idle, self.scheduling = (
            at,
            counts,
            stops,
            idle,
            scheduling,
        )
        self.weights, self.inherent, self.cut = weights, inherent, cut
        self.affinity, self.workers = affinity, workers

    @classmethod
    def of(cls, state: State, at: float) -> "CounterSnapshot":
        """Take a snapshot of `state` at time `at`."""
        counters = state.counters
        counts = {
            "turns": counters.turns,
            "output_tokens": counters.output_tokens,
            "cached_tokens": counters.cached_tokens,
            "context_tokens": counters.context_tokens,
            "started": counters.started,
            "cancelled": counters.cancelled,
            "dropped": sum(counters.dropped.values()),
            "retried": sum(counters.retried.values()),
            "evicted": counters.evicted,
            "returned": counters.turns_returned,
        }
        idle = {"engines": dict(state.idle.engines), "trainer": dict(state.idle.trainer)}
        scheduling = msgspec.structs.asdict(counters.scheduling)
        return cls(
            at,
            counts,
            dict(counters.stop_reasons),
            idle,
            scheduling,
            msgspec.structs.asdict(counters.weights),
            dict(counters.inherent),
            dict(counters.cut_turns),
            _affinity(state),
            worker_figures(state, at),
        )

    def since(self, before: "CounterSnapshot") -> dict[str, Any]:
        """Return what was counted between `before` and this snapshot."""
        wall_s = max(1e-9, self.at - before.at)
        added = {name: count - before.counts[name] for name, count in self.counts.items()}
        inherent = {
            age: count - before.inherent.get(age, 0) for age, count in sorted(self.inherent.items())
        }
        cut = {name: count - before.cut.get(name, 0) for name, count in self.cut.items()}
        stops = {
            reason: count - before.stops.get(reason, 0) for reason, count in self.stops.items()
        }
        return {
            "wall_s": round(wall_s, 4),
            "tokens_per_s": round(added["output_tokens"] / wall_s, 1),
            **added,
            "cut_turns": {name: count for name, count in cut.items() if count},
            "scheduling": {
                name: round(value - before.scheduling[name], 4)
                for name, value in self.scheduling.items()
            },
            **({"affinity": self.affinity} if self.affinity else {}),
            **({"workers": self._workers_since(before)} if self.workers else {}),
            "weights": {
                name: round(value - before.weights[name], 4) for name, value in self.weights.items()
            },
            "stop_reasons": {reason: count for reason, count in stops.items() if count},
            "inherent_staleness": {str(age): count for age, count in inherent.items() if count},
            "idle": {
                component: {
                    cause: round(seconds - before.idle[component].get(cause, 0.0), 4)
                    for cause, seconds in causes.items()
                }
                for component, causes in self.idle.items()
            },
        }

    def _workers_since(self, before: "CounterSnapshot") -> dict[str, float]:
        """Return the present and the intended number of workers, and what was added to
        the other figures of `worker_figures`.
        """
        summed = {name: before.workers.get(name, 0.0) for name in ("starts", "seconds")}
        return {
            name: round(value - summed.get(name, 0.0), 4) for name, value in self.workers.items()
        }


def worker_figures(state: State, at: float) -> dict[str, float]:
    """Return the number of rollout workers with a process, the intended number, the
    trajectories that wait to be started, the starts of workers that were needed, and
    the seconds of all workers until `at`. Empty if the number of workers is fixed.
    """
    part = cluster_of(state).scaling
    if not part.peaks:
        return {}
    return {
        "running": processes(state),
        "wanted": part.target,
        "queued": len(state.pools.queued),
        "starts": part.starts,
        "seconds": part.worker_s + processes(state) * max(0.0, at - part.at),
    }


def _affinity(state: State) -> dict[str, Any]:
    """Return for each task domain its shares of the pools, if they are learned, and the
    seconds of a token in each pool, with the standard deviation of the errors.
    """
    affinity = pools_of(state)
    if affinity is None:
        return {}
    return {
        name: {
            "shares": {
                pool: round(share, 4) for pool, share in affinity.shares.get(name, {}).items()
            },
            "seconds": {
                pool: {
                    kind: [float(f"{cost.seconds:.4g}"), float(f"{cost.error_s:.2g}")]
                    for kind, cost in (("prompt", costs.prompt), ("output", costs.output))
                }
                for pool, costs in by_pool.items()
            },
        }
        for name, by_pool in affinity.token_costs.items()
    }
