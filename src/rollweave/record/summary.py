"""The figures of a run: what each training step added to the core's counters, for its
line in `metrics.jsonl`; the result, `summary.json`; and the account that must balance.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollweave.core.core import Core
from rollweave.core.mechanisms.cluster.workers import cluster_of, processes
from rollweave.core.mechanisms.pools import pools_of
from rollweave.core.reading.status import Account
from rollweave.core.state import State
from rollweave.io.disk import replace_file
from rollweave.schema.base import Struct
from rollweave.schema.errors import RollweaveError

K = TypeVar("K")
N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class CounterSnapshot:
    """The core's counters at one moment. The difference of two snapshots shows what a
    step added.
    """

    at: float
    counts: dict[str, int]
    stops: dict[str, int]
    idle: dict[str, dict[str, float]]
    scheduling: dict[str, float]
    weights: dict[str, float]
    inherent: dict[int, int]
    cut: dict[str, int]
    affinity: dict[str, Any]
    workers: dict[str, float]

    @classmethod
    def of(cls, state: State, at: float) -> "CounterSnapshot":
        """Take a snapshot of `state` at time `at`."""
        counters = state.counters
        return cls(
            at=at,
            counts={
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
            },
            stops=dict(counters.stop_reasons),
            idle={"engines": dict(state.idle.engines), "trainer": dict(state.idle.trainer)},
            scheduling=msgspec.structs.asdict(counters.scheduling),
            weights=msgspec.structs.asdict(counters.weights),
            inherent=dict(counters.inherent),
            cut=dict(counters.cut_turns),
            affinity=_affinity(state),
            workers=worker_figures(state, at),
        )

    def since(self, before: "CounterSnapshot") -> dict[str, Any]:
        """Return what was counted between `before` and this snapshot."""
        wall_s = max(1e-9, self.at - before.at)
        added = _added(self.counts, before.counts)
        inherent = dict(sorted(_added(self.inherent, before.inherent).items()))
        return {
            "wall_s": round(wall_s, 4),
            "tokens_per_s": round(added["output_tokens"] / wall_s, 1),
            **added,
            "cut_turns": _nonzero(_added(self.cut, before.cut)),
            "scheduling": _added(self.scheduling, before.scheduling),
            **({"affinity": self.affinity} if self.affinity else {}),
            **({"workers": self._workers_since(before)} if self.workers else {}),
            "weights": _added(self.weights, before.weights),
            "stop_reasons": _nonzero(_added(self.stops, before.stops)),
            "inherent_staleness": {str(age): n for age, n in _nonzero(inherent).items()},
            "idle": {part: _added(causes, before.idle[part]) for part, causes in self.idle.items()},
        }

    def _workers_since(self, before: "CounterSnapshot") -> dict[str, float]:
        """Return the present and the intended number of workers, and what was added to
        the other figures of `worker_figures`.
        """
        summed = {name: before.workers.get(name, 0.0) for name in ("starts", "seconds")}
        return _added(self.workers, summed)


def _added(now: Mapping[K, N], before: Mapping[K, N]) -> dict[K, N]:
    """Return how much each counter has grown, to four decimal places."""
    return {key: round(value - before.get(key, 0), 4) for key, value in now.items()}


def _nonzero(counts: Mapping[K, N]) -> dict[K, N]:
    return {key: count for key, count in counts.items() if count}


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


class Summary(Struct, frozen=True, kw_only=True):
    """`success_rate`, `mean_reward` and `eval_episodes` are the figures of the final
    evaluation, or of the last periodic evaluation if there is no final one.
    `success_rate` has only the task domains whose environment defines success;
    `eval_tasks` counts the different tasks of the episodes.

    `turns` counts the agent's turns, `cut_turns` the turns that ended at
    `max_turn_tokens`, by task domain, and `tokens` the sampled tokens; `wall_s` is the
    seconds of the run over all its lives; `error` is empty if the run did not fail.
    `attempts` counts launches: trajectories of training and of evaluations, and later
    attempts at them (`again`). Each attempt has one of `stop_reasons`. `continued`
    attempts began with the recorded turns of an attempt that was lost with its
    controller. `interrupted` is true if the user ended the run; `ended_by` names the
    setting that ended the run before `run.steps`, if any. `engines` counts the engines
    that joined the run and the engines that were withdrawn. `weights` has the seconds
    in which serving engines received new weights, and the seconds for which they
    stopped. `workers` has the starts of rollout workers that were needed, and the
    seconds of all workers, if their number changed.
    """

    success_rate: dict[str, float]
    mean_reward: dict[str, float] = msgspec.field(default_factory=dict)
    eval_episodes: dict[str, int]
    eval_tasks: dict[str, int] = msgspec.field(default_factory=dict)
    steps: int
    trajectories: int
    tokens: int
    turns: int = 0
    cut_turns: dict[str, int] = msgspec.field(default_factory=dict)
    wall_s: float
    staleness_max: int
    inherent_staleness: dict[str, int]
    stop_reasons: dict[str, int]
    attempts: dict[str, int] = msgspec.field(default_factory=dict)
    account: Account
    best_step: int | None = None
    continued: int = 0
    retried: dict[str, int]
    watchdog: dict[str, int]
    engines: dict[str, int] = msgspec.field(default_factory=dict)
    idle: dict[str, dict[str, float]]
    scheduling: dict[str, float] = msgspec.field(default_factory=dict)
    weights: dict[str, float] = msgspec.field(default_factory=dict)
    workers: dict[str, float] = msgspec.field(default_factory=dict)
    error: str = ""
    ended_by: str = ""
    interrupted: bool = False


class AccountError(RollweaveError):
    """A trajectory is unaccounted for, which is a bug of Rollweave."""


def summarize(core: Core, *, evaluation: dict[str, Any] | None, wall_s: float) -> Summary:
    """Return the summary of a core that has finished.

    Raises `AccountError` if the account does not balance.
    """
    state, counters, account = core.state, core.state.counters, core.account()
    if not account.balanced or account.in_flight:
        raise AccountError(
            f"trajectories are unaccounted for at the end of the run: {account_line(account)}"
        )
    return Summary(
        success_rate=dict(evaluation["success"]) if evaluation is not None else {},
        mean_reward=dict(evaluation["reward"]) if evaluation is not None else {},
        eval_episodes=dict(evaluation["episodes"]) if evaluation is not None else {},
        eval_tasks=dict(evaluation.get("distinct", {})) if evaluation is not None else {},
        steps=state.trainer.step,
        trajectories=account.started,
        tokens=counters.output_tokens,
        turns=counters.turns,
        cut_turns=dict(counters.cut_turns),
        wall_s=round(wall_s, 3),
        staleness_max=max(counters.staleness, default=0),
        inherent_staleness={str(age): count for age, count in sorted(counters.inherent.items())},
        stop_reasons=dict(counters.stop_reasons),
        attempts={
            "training": counters.started,
            "evaluation": counters.eval_started,
            "again": counters.relaunched,
        },
        account=account,
        best_step=state.evaluations.best_step,
        continued=counters.continued,
        retried=dict(counters.retried),
        watchdog=dict(counters.watchdog),
        engines={"joined": counters.engines_joined, "left": counters.engines_left},
        idle={"engines": dict(state.idle.engines), "trainer": dict(state.idle.trainer)},
        scheduling=msgspec.structs.asdict(counters.scheduling),
        weights=msgspec.structs.asdict(counters.weights),
        workers={
            name: round(value, 3)
            for name, value in worker_figures(state, wall_s).items()
            if name in ("starts", "seconds")
        },
        error=state.error,
        ended_by=_ended_by(core),
        interrupted=state.skip_final_eval,
    )


def _ended_by(core: Core) -> str:
    step = core.state.evaluations.target_step
    return "" if step is None else f"eval.stop_at was reached at step {step}"


def headline_figures(
    success: Mapping[str, float], reward: Mapping[str, float]
) -> dict[str, tuple[str, float]]:
    """Return for each task domain the kind and the value of its headline figure:
    success if the environment defines success, else the reward.
    """
    return {
        name: ("success", success[name]) if name in success else ("reward", value)
        for name, value in reward.items()
    }


def cut_turns_line(cut: Mapping[str, int], turns: int) -> str:
    """Return a line for people about how many turns were cut; "" if no turn was."""
    total = sum(cut.values())
    if not total:
        return ""
    share = total / max(turns, total)
    return f"{total:,} of {turns:,} turns ({share:.1%}) cut at max_turn_tokens: {', '.join(cut)}"


def write_summary(path: Path, summary: Summary) -> None:
    """Write `summary.json`, whole or not at all. Raises DiskError."""
    replace_file(path, json.dumps(msgspec.to_builtins(summary), indent=2).encode() + b"\n")


def outcome_line(summary: Summary) -> str:
    """Return the outcome of a run as one line for people: the episodes if the run only
    evaluated, else the account.
    """
    if summary.account.started or not summary.eval_episodes:
        return account_line(summary.account)
    episodes = (f"{count} of {task}" for task, count in summary.eval_episodes.items())
    return f"evaluated episodes: {', '.join(episodes)}"


def scheduling_line(counted: Mapping[str, float]) -> str:
    """Return a line for people about what scheduling by trajectory did; "" if no
    lengths were predicted, and no turn, prompt, engine, place or task domain moved.
    """
    domains, split = counted.get("moved_domains", 0), counted.get("split_turns", 0)
    elsewhere = [f"{domains:,.0f} changes of a domain's pools"] if domains else []
    if split:
        failed = counted.get("split_failed", 0)
        elsewhere.append(
            f"{split:,.0f} prompts on prefill engines"
            + (f" ({failed:,.0f} of them failed)" if failed else "")
        )
    if moves := counted.get("moved_engines", 0):
        elsewhere.append(f"{moves:,.0f} moves of engines between prefill and decoding")
    if moves := counted.get("moved_ranks", 0):
        places = "place" if moves == 1 else "places"
        elsewhere.append(f"{moves:,.0f} {places} moved between engines and the trainer")
    to_pools = ", ".join(elsewhere)
    requested, moved, failed = (
        counted.get("predictions", 0),
        counted.get("migrations", 0),
        counted.get("migrations_failed", 0),
    )
    if not (requested or moved or failed or counted.get("preemptions", 0)):
        return to_pools
    late_share = counted.get("predictions_late", 0) / requested if requested else 0.0
    parts = [
        f"{requested:,.0f} predictions ({late_share:.0%} late)",
        f"{counted['preemptions']:,.0f} preemptions",
        f"{moved:,.0f} moves",
    ]
    if failed:
        parts[-1] += f" ({failed:,.0f} more failed)"
    parts.append(f"{counted['exposed_s']:.1f} s exposed")
    if counted.get("released", 0):
        parts.append(f"{counted['released']:,.0f} engines freed")
    if counted.get("reallocations", 0):
        parts.append(f"{counted['reallocations']:,.0f} changes of the fleet")
    if to_pools:
        parts.append(to_pools)
    return ", ".join(parts)


def weights_line(counted: Mapping[str, float]) -> str:
    """Return a line of the summary about how long engines stopped for new weights; ""
    if no serving engine took new weights.
    """
    updates = counted.get("updates", 0)
    if not updates:
        return ""
    text = (
        f"{updates:,.0f} updates of engines, which stopped for {counted['stopped_s']:,.2f} s; "
        f"{counted['transfer_s']:,.2f} s of transfer into engines"
    )
    if counted.get("fetch_s", 0.0):
        nbytes = counted.get("fetched_bytes", 0)
        sent = f" ({nbytes / 1e6:,.1f} MB between hosts)" if nbytes else ""
        text += f", {counted['fetch_s']:,.2f} s into relays{sent}"
    return text


def workers_line(counted: Mapping[str, float], wall_s: float) -> str:
    """Return a line of the summary about rollout workers; "" if their number did not
    change.
    """
    if not counted:
        return ""
    mean = counted["seconds"] / wall_s if wall_s else 0.0
    return f"{mean:.2f} on average, {counted['starts']:,.0f} starts of workers that were needed"


def account_line(account: Account) -> str:
    """Return the account as one line for people."""
    dropped = sum(account.dropped.values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(account.dropped.items()))
    text = (
        f"{account.started} started = {account.trained} trained + {dropped} "
        f"dropped{f' ({reasons})' if reasons else ''} + {account.buffered} buffered + "
        f"{account.cancelled} cancelled"
    )
    return f"{text} + {account.in_flight} in flight" if account.in_flight else text
