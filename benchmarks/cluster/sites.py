"""Bench `cluster_sites`: a run on hosts at two sites that a slow link joins: the bytes
that cross it for a version of the weights, and the seconds until the other site has
one.

Two hosts are at the trainer's site and two at the other one; the trainer is on one of
the first, an engine on each of the four, since a host without engines receives no
weights. The same run is repeated without `site`, with it, and with changes instead of
whole versions; and once over a link without a limit.

Root, `ip` and `tc` are needed; without them, no figure is measured.
"""

import os
import signal
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.agents import HostsByHand
from benchmarks.cluster.bench import FIXED
from benchmarks.cluster.hosts import command_of, measure_on
from benchmarks.cluster.run import PATIENCE_S, ClusterRun, lost_trajectories
from benchmarks.contract import Figure, Result
from benchmarks.runs import conditions_of, example
from benchmarks.soak.run_under_test import RELAY
from rollweave.core.mechanisms.relays.state import part_of
from rollweave.envs.rules import rules_of
from rollweave.record.journal import Replay
from rollweave.schema.commands import FetchWeights
from rollweave.schema.config.loading import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import WeightsFetched, WeightsPublished

PORT = 7400

HOSTS, FAR = 4, 2
"""Number of hosts, and of those at the other site."""

POOLS = ("near", "far")

TRAINER = "trainer"
"""The pool of the trainer."""

VARIANTS = ("free", "no_site", "site", "changes")
"""`free` has no limited link; `no_site` and `site` send whole versions."""

MEASURED = ("crossed_mb", "arrived_s", "step_s", "stopped_s")
"""Figures that are measured of each variant."""

FIGURES = (
    "version_mb",
    *(f"{name}_{variant}" for name in MEASURED for variant in VARIANTS),
    "lost_trajectories",
    "unaccounted",
    "leftovers",
)


@dataclass(frozen=True, kw_only=True)
class SitesPlan:
    """Length of the bench: `rounds` of a run of `steps` steps for each variant, over a
    link of `mbits`.
    """

    settings: tuple[str, ...]
    rounds: int
    steps: int
    mbits: float


SETTINGS = (
    "model.scratch.hidden=256",
    "model.scratch.layers=4",
    "warmup.steps=2",
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "rollout.max_running=32",
    "trainer.lr=1e-4",
    "trainer.pool=trainer",
    "pools.trainer.resource=trainer",
    "pools.near.resource=near",
    "pools.far.resource=far",
    "engines=[{pool='near', count=2, max_slots=16}, {pool='far', count=2, max_slots=16}]",
    "eval={final_episodes=16}",
    "run.checkpoint_every=0",
    "run.sinks=[]",
)

FULL = SitesPlan(settings=SETTINGS, rounds=2, steps=8, mbits=20.0)
QUICK = SitesPlan(settings=SETTINGS, rounds=1, steps=4, mbits=100.0)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The traffic over the link during one run, and how long it took.

    `versions` have reached the other site, each `arrived_s` after it was published on
    all hosts there; a relay there received at most `version_bytes` for one of them.
    `fetches` were begun over the link, of which those that are repeated receive only
    what is missing.
    """

    versions: int
    fetches: int
    version_bytes: int
    arrived_s: list[float]


def bench_cluster_sites(*, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return the figures of `FIGURES`."""
    return measure_sites(QUICK if quick else FULL, progress=progress)


def measure_sites(plan: SitesPlan, *, progress: Callable[[str], None]) -> Result:
    """Run the bench.

    Raises RollweaveError where a run fails or makes no progress.
    """

    def measure(hosts: HostsByHand, directory: Path) -> Result:
        measuring = _Measuring(plan, hosts, directory, progress)
        for number in range(plan.rounds):
            for variant in VARIANTS:
                measuring.run(variant, number)
        return Result(
            bench="cluster_sites",
            figures=dict.fromkeys(FIGURES)
            | measuring.figures()
            | {"leftovers": len(hosts.leftovers()) + measuring.leftovers},
            conditions=_conditions(plan) | measuring.samples(),
        )

    return measure_on(
        lambda directory: HostsByHand(HOSTS, directory, megabits=None, far=FAR),
        measure,
        bench="cluster_sites",
        figures=FIGURES,
        progress=progress,
    )


class _Measuring:
    """The runs of one bench, and what is known of them."""

    def __init__(
        self,
        plan: SitesPlan,
        hosts: HostsByHand,
        directory: Path,
        progress: Callable[[str], None],
    ) -> None:
        self._plan, self._hosts, self._directory, self._progress = plan, hosts, directory, progress
        self._samples: dict[str, list[float]] = {}
        self._suspected: dict[str, list[int]] = {}
        self._version_bytes = 0
        self._lost = self._unaccounted = 0
        self.leftovers = 0

    def run(self, variant: str, number: int) -> None:
        """Measure one run."""
        plan, hosts = self._plan, self._hosts
        hosts.limit_sites(None if variant == "free" else plan.mbits)
        settings = (
            *plan.settings,
            f"run.steps={plan.steps}",
            f"run.seed={number}",
            f'run.dir="{self._directory}"',
            f"run.name={variant}{number}",
            *(() if variant == "no_site" else ("pools.far.site=elsewhere",)),
            *(() if variant == "changes" else ('ablation.without=["deltas"]',)),
        )
        before = hosts.crossed_bytes()
        with ClusterRun(config_of(settings, hosts), hosts) as run:
            run.start()
            start_agents(hosts)
            if variant == "no_site":
                join_alternating(run, hosts)
            summary = run.finish(PATIENCE_S)
            crossing = crossing_of(run)
            weights = summary["weights"]
            self._add(
                "crossed_mb", variant, (hosts.crossed_bytes() - before) / 1e6 / crossing.versions
            )
            self._add("arrived_s", variant, statistics.median(crossing.arrived_s))
            self._add("step_s", variant, run.training_s(0, plan.steps - 1) / (plan.steps - 1))
            self._add("stopped_s", variant, weights["stopped_s"] / max(1, weights["updates"]))
            suspected = summary["watchdog"].get("relay_suspected", 0)
            self._suspected.setdefault(variant, []).append(suspected)
            self._version_bytes = max(self._version_bytes, crossing.version_bytes)
            self._lost += lost_trajectories(summary["account"])
            self._unaccounted += run.unaccounted(summary["account"])
            self.leftovers += run.leftovers
        hosts.wait_for_agents()
        last = {name: self._samples[f"{name}_{variant}"][-1] for name in MEASURED}
        self._progress(f"{variant}, seed {number}: {last}, {suspected} relays suspected")

    def _add(self, name: str, variant: str, value: float) -> None:
        self._samples.setdefault(f"{name}_{variant}", []).append(round(value, 3))

    def figures(self) -> dict[str, Figure]:
        """Return the median of each figure over the rounds."""
        medians = {name: statistics.median(values) for name, values in self._samples.items()}
        return {
            "version_mb": round(self._version_bytes / 1e6, 3),
            **medians,
            "lost_trajectories": self._lost,
            "unaccounted": self._unaccounted,
        }

    def samples(self) -> dict[str, Any]:
        """Return all values of each figure, and how often a relay was suspected:
        another one then fetches past it, so that more bytes cross.
        """
        suspected = {f"suspected_{variant}_all": all_ for variant, all_ in self._suspected.items()}
        return {f"{name}_all": values for name, values in self._samples.items()} | suspected


def config_of(settings: tuple[str, ...], hosts: HostsByHand) -> RunConfig:
    """Return the configuration of a run on these hosts. Raises ConfigError."""
    cluster = f'cluster={{address="{hosts.controller}:{PORT}", hosts={HOSTS}, join_s=120}}'
    config = load(example(FIXED), [cluster, *settings])
    return config.model_copy(update={"eval": config.eval.model_copy(update={"stop_at": None})})


def start_agents(hosts: HostsByHand) -> None:
    """Start the agents of all hosts in their pools: the trainer's is the first host
    alone, so that the order in which relays join decides the chain.
    """
    for number in range(HOSTS):
        pools = [POOLS[number >= HOSTS - FAR], *([TRAINER] if number == 0 else [])]
        options = [text for pool in pools for text in ("--resource", f"{pool}=1")]
        hosts.start(number, port=PORT, options=options)


def join_alternating(run: ClusterRun, hosts: HostsByHand) -> None:
    """Let the relays join in the order near, far, near, far.

    The later ones are stopped as soon as their processes start. Raises RollweaveError.
    """
    late = (HOSTS - FAR - 1, HOSTS - 1)
    stopped: dict[int, int] = {}

    def all_stopped() -> bool:
        for host in late:
            for pid in hosts.processes(host):
                if host not in stopped and RELAY in command_of(pid):
                    os.kill(pid, signal.SIGSTOP)
                    stopped[host] = pid
        return len(stopped) == len(late)

    run.wait(all_stopped, PATIENCE_S, "the relays that join later")
    for host in late:
        joined = HOSTS - len(stopped)

        def are_joined(count: int = joined) -> bool:
            part = part_of(run.state())
            return part is not None and len(part.order) == count

        run.wait(are_joined, PATIENCE_S, f"{joined} relays")
        os.kill(stopped.pop(host), signal.SIGCONT)


def crossing_of(run: ClusterRun) -> Crossing:
    """Return what crossed the link during a run that is over, from its journal."""
    replay = Replay(run.run.journal, run.config, rules=rules_of(run.config))
    published: dict[int, float] = {}
    fetched: dict[int, dict[str, float]] = {}
    most = fetches = 0
    state = replay.core.state

    def is_far(relay_id: str | None) -> bool:
        part = part_of(state)
        relay = part.relays.get(relay_id or "") if part is not None else None
        return relay is not None and "far" in state.hosts.up[relay.host].pools

    for now, event, commands in replay:
        fetches += sum(
            isinstance(command, FetchWeights)
            and is_far(command.relay_id)
            and not is_far(command.source)
            for command in commands
        )
        if isinstance(event, WeightsPublished):
            published[event.publication_id] = now
        elif isinstance(event, WeightsFetched) and is_far(event.relay_id):
            fetched.setdefault(event.publication_id, {})[event.relay_id] = now
            most = max(most, event.nbytes)
    return Crossing(
        versions=len(fetched),
        fetches=fetches,
        version_bytes=most,
        arrived_s=[
            max(times.values()) - published[publication_id]
            for publication_id, times in fetched.items()
            if len(times) == FAR
        ],
    )


def _conditions(plan: SitesPlan) -> dict[str, Any]:
    return {
        **conditions_of(Path(FIXED), plan.settings),
        "hosts": f"{HOSTS} network namespaces of this machine, whose cores they share, {FAR} of "
        f"them behind a link of {plan.mbits:g} Mbit/s in both directions (`tc`); the controller "
        "and the environments are on the near side; the trainer is on a near host, an engine on "
        "each host",
        "variants": "free: no limit, with `site`, whole versions; no_site: the relays join in "
        "the order near, far, near, far, which is then their chain; site: with `pools.far.site`; "
        "changes: the default, whole versions or changes, whichever was faster. Medians of "
        f"{plan.rounds} runs of {plan.steps} steps",
        "version_mb": "bytes of a whole version",
        "crossed_mb_site": "bytes that the link carried to the other site, with headers and with "
        "all traffic of the run, over the versions that reached it",
        "arrived_s_site": "from a publication until both hosts of the other site had the version; "
        "median of a run",
        "step_s_site": "seconds from step to step",
        "stopped_s_site": "seconds for which an engine stopped for an update",
        "unaccounted": "started - (trained + dropped + cancelled + buffered), plus the difference "
        "to the journals, over all runs",
    }
