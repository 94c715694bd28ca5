"""Bench `cluster`: two examples trained across three hosts, beside the same runs on one
host; and how a run continues after the loss of a host.

The hosts are network namespaces with links of limited speed, and share the cores of
this machine. Each is a node of a real Ray cluster, with a resource for the trainer or
one for engines, and pools select them by these. The controller and Ray's head are on
none of them. Runs on one host have as many engines.

Root, `ip`, `tc` and Ray are needed; without them, no figure is measured.
"""

import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.cluster.hosts import MEGABITS
from benchmarks.cluster.run import PATIENCE_S, ClusterRun, lost_trajectories
from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress, kept_if_broken
from benchmarks.runs import conditions_of
from packages.ray.benchmarks.plan import (
    ENGINES,
    FIGURES,
    FIXED,
    FULL,
    HOSTS,
    LONGTAIL,
    QUICK,
    RESOURCES,
    UNBOUNDED,
    ClusterPlan,
    config_of,
)
from packages.ray.benchmarks.ray_hosts import RayHosts
from rollweave.schema.config.root import RunConfig


def bench_cluster(*, quick: bool, progress: Progress) -> Result:
    """Return the figures of `FIGURES`; none is measured where there are no hosts.

    Raises RollweaveError where a run fails or makes no progress.
    """
    plan = QUICK if quick else FULL
    with RayHosts(RESOURCES) as hosts:
        if hosts.why_not:
            return Result.not_measured("cluster", FIGURES, hosts.why_not)
        return kept_if_broken(
            "cluster", lambda directory: _measured(plan, hosts, directory, progress), progress
        )


def _measured(plan: ClusterPlan, hosts: RayHosts, directory: Path, progress: Progress) -> Result:
    measuring = _Measuring(plan, hosts, directory, progress)
    measuring.compare("", FIXED, plan.pairs, plan.steps, steps_after=plan.steps_after)
    measuring.compare("_longtail", LONGTAIL, plan.tails, plan.tail_steps)
    if plan.losses:
        measuring.lose_hosts()
    measuring.finish()
    figures: dict[str, Figure] = {name: measuring.figures.get(name) for name in FIGURES}
    why = "not measured: --quick has no such runs"
    unmeasured = {name: why for name, figure in figures.items() if figure is None}
    conditions = unmeasured | measuring.conditions | _conditions(plan)
    return Result(bench="cluster", figures=figures, conditions=conditions)


class _Measuring:
    """The runs of one bench, and their figures."""

    def __init__(
        self,
        plan: ClusterPlan,
        hosts: RayHosts,
        directory: Path,
        progress: Progress,
    ) -> None:
        self._plan, self._hosts, self._directory, self._progress = plan, hosts, directory, progress
        self._runs = 0
        self._ms_per_turn: list[float] = []
        self._most = 0
        self._batch_bytes = self._sent_bytes = 0.0
        self._received_bytes = self._needed_bytes = 0.0
        self._updates = {"transfer_s": 0.0, "stopped_s": 0.0, "updates": 0.0, "staged": 0.0}
        self._detected: list[float] = []
        self._recovered: list[float] = []
        self._leftovers = 0
        self.figures: dict[str, Figure] = {"lost_trajectories": 0, "unaccounted": 0}
        self.conditions: dict[str, Any] = {}

    def compare(
        self, suffix: str, name: str, pairs: int, steps: int, *, steps_after: int = 0
    ) -> None:
        """Train an example on one host and on all of them, alternating."""
        ratios: list[float] = []
        successes: list[float] = []
        for number in range(pairs):
            seconds: dict[bool, float] = {}
            for on_cluster in (False, True) if number % 2 == 0 else (True, False):
                more = steps_after if on_cluster else 0
                settings = (f"run.steps={steps + more}", f"run.seed={number}")
                with self._run(name, settings, on_cluster=on_cluster) as run:
                    if more:
                        self._lose(run, after=steps, with_trainer=True)
                    summary = run.finish(PATIENCE_S)
                    seconds[on_cluster] = run.training_s(0, steps - 1)
                    self._balance(run, summary, on_cluster=on_cluster)
                    if on_cluster:
                        successes.append(min(summary["success_rate"].values(), default=0.0))
                self._hosts.wait_for_agents()
            ratios.append(seconds[True] / seconds[False])
            self._progress(
                f"{name}, seed {number}: {seconds[False]:.1f} s on one host, "
                f"{seconds[True]:.1f} s on {HOSTS}, success {successes[-1]:.3f}"
            )
        if pairs:
            self.figures[f"wall_over_one_host{suffix}"] = round(statistics.median(ratios), 3)
            self.figures[f"success{suffix}"] = round(statistics.median(successes), 4)
            self.conditions |= {
                f"wall_over_one_host{suffix}_all": [round(ratio, 3) for ratio in ratios],
                f"success{suffix}_all": [round(success, 4) for success in successes],
            }

    def lose_hosts(self) -> None:
        """Let hosts lose their power, in turn that of the trainer and another one; each
        comes back once training is as far as it was.
        """
        with self._run(FIXED, (f"run.steps={UNBOUNDED}",), on_cluster=True) as run:
            for number in range(self._plan.losses):
                after = run.reached + self._plan.trained_first
                victim = self._lose(run, after=after, with_trainer=number % 2 == 0)
                self._come_back(run, victim)
            self._balance(run, run.stop(PATIENCE_S), on_cluster=True)
        self._hosts.wait_for_agents()

    def finish(self) -> None:
        """Add the figures of all runs."""
        self.figures |= {
            "host_loss_detected_s": round(statistics.median(self._detected), 2),
            "host_loss_recovered_s": round(statistics.median(self._recovered), 2),
            "controller_ms_per_turn": round(statistics.median(self._ms_per_turn), 3)
            if self._ms_per_turn
            else None,
            "controller_bytes_share": round(self._sent_bytes / self._batch_bytes, 5)
            if self._batch_bytes
            else None,
            "bytes_per_host_over_needed": round(self._received_bytes / self._needed_bytes, 4)
            if self._needed_bytes
            else None,
            "trajectories_at_once": self._most,
            "exposed_over_transfer": round(
                self._updates["stopped_s"] / self._updates["transfer_s"], 4
            )
            if self._updates["transfer_s"]
            else None,
            "leftovers": len(self._hosts.leftovers()) + self._leftovers,
        }
        self.conditions |= {
            "host_loss_detected_s_all": [round(seconds, 2) for seconds in self._detected],
            "host_loss_recovered_s_all": [round(seconds, 2) for seconds in self._recovered],
            "updates_of_engines": {name: round(sum_, 2) for name, sum_ in self._updates.items()},
        }

    def _lose(self, run: ClusterRun, *, after: int, with_trainer: bool) -> int:
        """Lose a host after so many steps of the run, and wait until training is as far
        as before; return the host.
        """
        run.wait(lambda: run.reached >= after, PATIENCE_S, f"step {after}")
        victim = self._victim(run, with_trainer=with_trainer)
        name, lost_at = self._hosts.name(victim), time.monotonic()
        self._hosts.fail(victim)
        detected = run.wait_for(lambda: run.lost_after(name, lost_at), f"the loss of host {name}")
        step, noticed_at = run.reached, lost_at + detected
        recovered = detected + run.wait_for(
            lambda: run.trained_after(step, noticed_at), f"step {step}"
        )
        self._detected.append(detected)
        self._recovered.append(recovered)
        self._progress(
            f"host {name} lost at step {step}: noticed after {detected:.1f} s, as far as before "
            f"after {recovered:.1f} s"
        )
        return victim

    def _come_back(self, run: ClusterRun, host: int) -> None:
        """Let a host come back, and wait until the run has it again."""
        name, back_at = self._hosts.name(host), time.monotonic()
        self._hosts.restore(host)
        self._hosts.start_nodes(host)
        run.wait_for(lambda: run.joined_after(name, back_at), f"host {name} again")

    def _victim(self, run: ClusterRun, *, with_trainer: bool) -> int:
        """Return the host of the trainer, or the next one."""
        trainer = self._hosts.number(run.trainer_host())
        return trainer if with_trainer else (trainer + 1) % HOSTS

    def _run(
        self, name: str, settings: tuple[str, ...], *, on_cluster: bool
    ) -> contextlib.AbstractContextManager[ClusterRun]:
        self._runs += 1
        own = (f'run.dir="{self._directory}"', f"run.name=run{self._runs}", "run.sinks=[]")
        hosts = self._hosts if on_cluster else None
        return _started(config_of(name, (*self._plan.settings, *settings, *own), hosts), hosts)

    def _balance(self, run: ClusterRun, summary: dict[str, Any], *, on_cluster: bool) -> None:
        """Add up what is lost, how engines of a cluster updated, and what its
        controller carried.
        """
        for figure, count in (
            ("lost_trajectories", lost_trajectories(summary["account"])),
            ("unaccounted", run.unaccounted(summary["account"])),
        ):
            before = self.figures[figure]
            assert isinstance(before, int), "it counts"
            self.figures[figure] = before + count
        self._leftovers += run.leftovers
        if on_cluster:
            if (each := run.controller_ms_per_turn()) is not None:
                self._ms_per_turn.append(each)
            self._most = max(self._most, run.most_at_once())
            batch_bytes, sent_bytes = run.batch_bytes()
            self._batch_bytes += batch_bytes
            self._sent_bytes += sent_bytes
            received_bytes, needed_bytes = run.weight_bytes()
            self._received_bytes += received_bytes
            self._needed_bytes += needed_bytes
            for name in self._updates:
                self._updates[name] += summary["weights"].get(name, 0.0)


@contextlib.contextmanager
def _started(config: RunConfig, hosts: RayHosts | None) -> Iterator[ClusterRun]:
    with ClusterRun(config, hosts) as run:
        run.start()
        yield run


def _conditions(plan: ClusterPlan) -> dict[str, Any]:
    return {
        **conditions_of(Path(FIXED), plan.settings),
        "hosts": f"{HOSTS} network namespaces of this machine, whose cores they share, each with "
        f"a link of {MEGABITS:g} Mbit/s; each is a node of Ray {version('ray')} with one CPU and "
        f"the resources {json.dumps(RESOURCES)}; the controller is on none of them",
        "wall_over_one_host": f"seconds from the first to the last of {plan.steps} steps over "
        f"those of the same run without a cluster, both with {ENGINES} engines; median of "
        f"{plan.pairs}",
        "host_loss_detected_s": "from the loss of power of a host to the warning that it is lost; "
        "host_loss_recovered_s: to the end of the first training step beyond those before",
        "lost_trajectories": "ended because of a host or controller, over all runs: must be 0",
        "controller_bytes_share": "bytes that controllers of clusters sent to the trainer's ranks "
        "for their batches, over the bytes of these batches' trajectories in the store",
        "bytes_per_host_over_needed": "bytes of weights that hosts received from each other over "
        "those among them that an engine of the host loaded, each once",
        "exposed_over_transfer": "seconds for which engines stopped for new weights over those in "
        "which they received and verified them",
    }
