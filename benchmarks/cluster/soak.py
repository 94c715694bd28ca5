"""Bench `cluster_soak`: a run on the three hosts of bench `cluster`, of which one is
lost every minute and comes back, for 15 minutes.

In turn, a host loses its power, its agent alone is killed, it hangs, or its link is cut
for 20 seconds. Otherwise it comes back half a minute after its loss; Ray starts another
agent by itself. At last the run is stopped in order and resumed with a few more steps,
and must succeed.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.bench import FIXED, HOSTS, QUICK_SETTINGS, RESOURCES, UNBOUNDED, config_of
from benchmarks.cluster.hosts import measure_on
from benchmarks.cluster.ray_hosts import RayHosts
from benchmarks.cluster.run import CLOCKS_S, PATIENCE_S, ClusterRun, lost_trajectories
from benchmarks.contract import Figure, Result
from benchmarks.runs import conditions_of
from rollweave.runtime.hosts.listener import SILENT_S
from rollweave.schema.hosts import ALIVE_S

NOTICED_S = SILENT_S + 2 * ALIVE_S
"""Maximum seconds until the loss of a host is noticed."""

FIGURES = (
    "success",
    "steps",
    "soaked_s",
    "hosts_lost",
    "losses_noticed",
    "losses_not_caused",
    "host_loss_detected_s",
    "host_loss_detected_s_max",
    "trainer_restarts",
    "lost_trajectories",
    "unaccounted",
    "leftovers",
)


@dataclass(frozen=True, kw_only=True)
class ClusterSoakPlan:
    """Length of the bench. A lost host is away for `away_s`."""

    settings: tuple[str, ...]
    rounds: int
    every_s: float
    away_s: float
    more: int


FULL = ClusterSoakPlan(
    settings=(
        "run.checkpoint_every=5",
        "faults.latency_s=0.1",
        "trainer.final_lr=1",
        "trainer.lr=2e-3",
        "eval.every=20",
    ),
    rounds=15,
    every_s=60.0,
    away_s=30.0,
    more=20,
)
QUICK = ClusterSoakPlan(
    settings=QUICK_SETTINGS,
    rounds=2,
    every_s=8.0,
    away_s=0.0,
    more=2,
)


def bench_cluster_soak(*, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return the figures of `FIGURES`."""
    return soak_cluster(QUICK if quick else FULL, progress=progress)


def soak_cluster(plan: ClusterSoakPlan, *, progress: Callable[[str], None]) -> Result:
    """Run the bench.

    Raises RollweaveError where the run fails or makes no progress.
    """
    return measure_on(
        lambda _: RayHosts(RESOURCES),
        lambda hosts, directory: _soaked(plan, hosts, directory, progress),
        bench="cluster_soak",
        figures=FIGURES,
        progress=progress,
    )


def _soaked(
    plan: ClusterSoakPlan, hosts: RayHosts, directory: Path, progress: Callable[[str], None]
) -> Result:
    settings = (
        *plan.settings,
        f"run.steps={UNBOUNDED}",
        f'run.dir="{directory}"',
        "run.name=soak",
        "run.sinks=[]",
    )
    with ClusterRun(config_of(FIXED, settings, hosts), hosts) as run:
        run.start()
        run.wait(lambda: run.trained, PATIENCE_S, "the first step")
        began, losses = time.monotonic(), _Losses(run, hosts, plan, progress)
        for number in range(plan.rounds):
            losses.one(number, due=began + number * plan.every_s)
        soaked_s = round(time.monotonic() - began, 1)
        restarts = len(run.warnings("restarted from checkpoint"))
        run.stop(PATIENCE_S)
        not_caused = losses.not_caused()
        hosts.wait_for_agents()
        run.start(steps=run.reached + plan.more)
        summary = run.finish(PATIENCE_S)
        not_caused += [line for _, line in run.losses()]
        hosts.wait_for_agents()
        figures = losses.figures() | {
            "soaked_s": soaked_s,
            "losses_not_caused": len(not_caused),
            "success": float(min(summary["success_rate"].values(), default=0.0)),
            "steps": summary["steps"],
            "trainer_restarts": restarts,
            "lost_trajectories": lost_trajectories(summary["account"]),
            "unaccounted": run.unaccounted(summary["account"]),
            "leftovers": run.leftovers + len(hosts.leftovers()),
        }
        conditions = {
            "account": summary["account"],
            "watchdog": summary["watchdog"],
            "losses_not_caused_all": not_caused,
        }
    return Result(
        bench="cluster_soak",
        figures={name: figures.get(name) for name in FIGURES},
        conditions=conditions | _conditions(plan),
    )


class _Losses:
    """The losses of hosts, one after the other, and what is known of them."""

    def __init__(
        self,
        run: ClusterRun,
        hosts: RayHosts,
        plan: ClusterSoakPlan,
        progress: Callable[[str], None],
    ) -> None:
        self._run, self._hosts, self._plan, self._progress = run, hosts, plan, progress
        self._detected: list[float] = []
        self._noticed_at: list[float] = []
        self._kinds: Counter[str] = Counter()
        self._kills = (self._fail, self._kill_agent, self._hang, self._cut)

    def one(self, number: int, *, due: float) -> None:
        """Lose a host once it is time, and a step was trained since the last time; wait
        until it is back.
        """
        run, trained = self._run, self._run.trained
        run.wait(
            lambda: time.monotonic() >= due and (run.trained > trained or number == 0),
            max(0.0, due - time.monotonic()) + PATIENCE_S,
            f"a step before loss {number}",
        )
        lose = self._kills[number % len(self._kills)]
        victim = -number % HOSTS
        name, lost_at = self._hosts.name(victim), time.monotonic()
        come_back = lose(victim)
        kind = lose.__name__.strip("_")
        self._kinds[kind] += 1
        self._detected.append(
            run.wait_for(lambda: run.lost_after(name, lost_at), f"the loss of host {name}")
        )
        self._noticed_at.append(lost_at + self._detected[-1])
        self._progress(
            f"loss {number + 1} at step {run.reached}: host {name} ({kind}), noticed after "
            f"{self._detected[-1]:.1f} s"
        )
        until = lost_at + (20.0 if kind == "cut" and self._plan.away_s else self._plan.away_s)
        run.wait(lambda: time.monotonic() >= until, PATIENCE_S, "the end of the absence")
        come_back()
        run.wait_for(lambda: run.joined_after(name, self._noticed_at[-1]), f"host {name} again")

    def not_caused(self) -> list[str]:
        """Return the losses that the run noticed beyond those of the bench."""
        return [
            line
            for at, line in self._run.losses()
            if all(abs(at - noticed_at) > CLOCKS_S for noticed_at in self._noticed_at)
        ]

    def figures(self) -> dict[str, Figure]:
        """Return the figures of the losses."""
        ordered = sorted(self._detected)
        return {
            "hosts_lost": sum(self._kinds.values()),
            "losses_noticed": sum(seconds <= NOTICED_S for seconds in ordered),
            "host_loss_detected_s": round(ordered[len(ordered) // 2], 2),
            "host_loss_detected_s_max": round(ordered[-1], 2),
        }

    def _fail(self, host: int) -> Callable[[], None]:
        self._hosts.fail(host)

        def come_back() -> None:
            self._hosts.restore(host)
            self._hosts.start_nodes(host)

        return come_back

    def _kill_agent(self, host: int) -> Callable[[], None]:
        self._hosts.kill_agent(host)
        return lambda: None

    def _hang(self, host: int) -> Callable[[], None]:
        self._hosts.hang(host)
        return lambda: self._hosts.wake(host)

    def _cut(self, host: int) -> Callable[[], None]:
        self._hosts.cut(host)
        return lambda: self._hosts.restore(host)


def _conditions(plan: ClusterSoakPlan) -> dict[str, Any]:
    return {
        **conditions_of(Path(FIXED), plan.settings),
        "rounds": f"{plan.rounds}, every {plan.every_s:g} s, but not before a step was trained "
        "since the previous one; in turn loss of power, kill of the agent, hang, and cut link, of "
        f"each of {HOSTS} hosts in turn; it comes back after {plan.away_s:g} s (a cut link after "
        "20 s)",
        "losses_noticed": f"of the hosts lost, those noticed within {NOTICED_S:g} s",
        "losses_not_caused": "losses of hosts that the run noticed beyond those of this bench",
        "success": "greedy, held-out, of the best checkpoint, after an orderly stop and a resume "
        f"of {plan.more} steps on the same hosts",
        "unaccounted": "started - (trained + dropped + cancelled + buffered), plus the difference "
        "to the journals of both controllers, plus trajectories that were trained twice",
        "leftovers": "processes on hosts and files of their agents at the end",
    }
