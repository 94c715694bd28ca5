"""A paper's set-up as a run on simulated GPUs, and the measurements of the run.

Invariants: choices that the papers leave open are made here, once, for every
experiment, and never by a result; the statements of each paper are in its experiment.
The seed of a run fixes it.
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollweave.core.mechanisms.relays.state import part_of
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import ServingFile
from rollweave.schema.errors import RollweaveError
from rollweave_papers.results import span
from rollweave_sim.cost import TrainerCost
from rollweave_sim.families import INIT_TIMEOUT_S
from rollweave_sim.hardware import gpu, link, model
from rollweave_sim.run import Outcome, SimMetrics, simulate
from rollweave_sim.training import passes_of
from rollweave_sim.workers import Dedicated, Judges, Serverless
from rollweave_sim.workload import Plan, Workload, workload
from rollweave_sim.world import Costs, Journal, World, costs_of

SLOTS = 256
"""Sequences that an engine decodes at once: the default `max_num_seqs` of vLLM 0.8,
RollArt's engine (§7.1).
"""

CHUNK_TOKENS = 2048
"""Maximum prompt tokens of an engine step: the default `max_num_batched_tokens` of vLLM
0.8 with chunked prefill.
"""

FOREVER_S = 1e6
"""Seconds of watchdogs and budgets that the papers' experiments do not state."""


KL = 1e-3
"""Coefficient of GRPO's KL divergence to a reference (DeepSeekMath eq. 3), which costs
a pass whatever its size. The log-probs under the weights before the step are a pass,
too: ROLL, with which RollArt and ROSE are built, makes both (`ref_log_probs` and
`cal_old_log_probs` in its pipelines), and Heddle §2.2 names the first.
"""


class ExperimentError(RollweaveError):
    """A simulated run did not finish."""


class Setup(Struct, frozen=True, kw_only=True):
    """A cluster and its training run. `tp` is the GPUs of an engine; `batch` counts
    trajectories of a step.

    `environments` are alive at once; 0 means as many as a batch, since no paper gives
    the number (RollArt's E, §6.2).
    """

    model: str
    tasks: tuple[str, ...]
    context: int
    rollout_gpus: int
    trainer_gpus: int
    batch: int
    group_size: int = 8
    environments: int = 0
    gpu: str = "h800"
    # GPUs for rollouts by their kind, in pools of that name; if empty, all are `gpu`
    kinds: Mapping[str, int] = {}
    # kind of GPU → phase of its engines; both if missing
    phases: Mapping[str, str] = {}
    # task → kind of GPU on which its turns run; any if missing
    prefers: Mapping[str, str] = {}
    relayed: bool = False  # a relay on each machine, from which its engines fetch weights
    tp: int = 1
    mode: str = "sync"
    alpha: int = 1
    link: str = "rdma"
    slots: int = SLOTS
    judges: int = 0  # instances that compute rewards; 0: as many as needed, at once
    serverless: bool = False  # rewards on a serverless platform, without `judges`
    reference: bool = True  # GRPO's, which DAPO has not (arXiv:2503.14476 §2.3)
    policies: tuple[str, ...] = ()  # of [ablation]
    without: tuple[str, ...] = ()  # of [ablation]
    colocated: bool = False  # trainer and engines take turns on the same GPUs
    rollout: Mapping[str, Any] = {}  # further settings of [rollout]
    # degrees from which the core chooses after each step; if empty, all have `tp`
    degrees: tuple[int, ...] = ()
    # a `ServingFile` of engines beside the run, of whose GPUs it borrows `borrowed`
    serving: Mapping[str, Any] = {}
    borrowed: int = 0
    sharing: str = "cooperative"

    def config(self, *, steps: int, seed: int = 0) -> RunConfig:
        """Return the configuration of a run of `steps` steps. Raises ValueError."""
        alive = self.environments or self.batch
        settings = {
            "max_slots": self.slots,
            "kv_tokens": 1 << 30,  # above the capacity of the GPUs, which are the limit
            "prefill_chunk_tokens": CHUNK_TOKENS,
        }
        kinds = self.kinds or ({self.gpu: self.rollout_gpus} if self.relayed else {})
        groups = [
            {
                "count": gpus // self.tp,
                "degree": self.tp,
                "pool": kind,
                "phase": self.phases.get(kind, "both"),
                **settings,
            }
            for kind, gpus in kinds.items()
        ]
        alike = {"count": self.rollout_gpus // self.tp, "degree": self.tp}
        return RunConfig.model_validate(
            {
                "run": {"name": "reproduce", "steps": steps, "seed": seed, "checkpoint_every": 0},
                "sim": {"model": self.model, "gpu": self.gpu, "link": self.link},
                "tasks": [
                    {
                        "env": task,
                        "pool": self.prefers.get(task),
                        "max_turns": 1000,
                        "max_tokens": self.context,
                        "max_turn_tokens": self.context,
                        "time_s": FOREVER_S,
                        "step_s": INIT_TIMEOUT_S,
                    }
                    for task in self.tasks
                ],
                "rollout": {
                    "mode": self.mode,
                    **({"alpha": self.alpha} if self.mode in ("partial", "bounded") else {}),
                    "groups_per_step": self.batch // self.group_size,
                    "group_size": self.group_size,
                    "max_running": alive,
                    **self.rollout,
                },
                "pools": {kind: {"resource": kind} for kind in kinds},
                "cluster": {"address": "127.0.0.1:0", "hosts": 1} if self.relayed else None,
                "engines": groups
                or {**({"degree": min(self.degrees)} if self.degrees else alike), **settings},
                "loans": {"engines": self.borrowed // self.tp} if self.borrowed else None,
                "allocation": {"budget": self.rollout_gpus} if self.degrees else None,
                "trainer": {"ranks": self.trainer_gpus, "colocated": self.colocated},
                "algorithm": {"correction": "decoupled", "kl": KL if self.reference else 0.0},
                "ablation": {"changes": (*self.policies, *(f"no_{name}" for name in self.without))},
                "eval": {"final_episodes": 0},
                "watchdog": {"turn_s": FOREVER_S, "train_s": FOREVER_S},
            }
        )

    def serving_engines(self) -> ServingFile | None:
        """Return the serving engines beside a run; None if there are none."""
        if not self.serving:
            return None
        return ServingFile.model_validate({**self.serving, "sharing": self.sharing})

    def rewards(self) -> Judges | None:
        """Return new instances that compute the rewards of a run."""
        if self.serverless:
            return Serverless()
        return Dedicated(self.judges) if self.judges else None

    def in_rollarts_order(self, alpha: int = 1) -> "Setup":
        """Return a copy in mode `bounded` whose engines are updated when a batch is
        ready, as in RollArt §6.2.

        There α bounds the distance to the engines' version, one less than ours to the
        version that is trained.
        """
        return self.but(mode="bounded", alpha=alpha + 1, without=(*self.without, "early_updates"))

    def but(self, **changes: Any) -> "Setup":
        """Return a copy with `changes`."""
        return msgspec.structs.replace(self, **changes)


class Pace(Struct, frozen=True, kw_only=True):
    """Sustained pace of a run: seconds of a step, and tokens of trained trajectories
    per second, prompts included (RollArt §7.1).
    """

    step_s: float
    tokens_per_s: float
    outcome: Any


def pace(
    setup: Setup,
    *,
    steps: int,
    vary: Callable[[Workload], Workload] | None = None,
    training: float = 1.0,
) -> Pace:
    """Return the mean over `steps` steps, where training takes `training` times as long
    as by its costs.

    Excluded are the first, which has no predecessor, and those at the end, which
    overlap with fewer rollouts because rollouts that could not be trained on are not
    launched. Raises ExperimentError.
    """
    ahead = (
        0
        if setup.mode == "sync"
        else max(1, setup.alpha)
        if setup.mode in ("bounded", "partial")
        else 1
    )
    outcome = steps_of(setup, steps=steps + 1 + ahead, vary=vary, training=training)
    seconds = sum(outcome.step_s[:steps])
    tokens = sum(line["batch_tokens"] for line in outcome.steps[1 : steps + 1])
    return Pace(step_s=seconds / steps, tokens_per_s=tokens / seconds, outcome=outcome)


def rollout_s(setup: Setup, *, steps: int) -> float:
    """Return the mean seconds from an empty cluster to a complete batch, over `steps`
    batches.

    Raises ExperimentError.
    """
    return statistics.fmean(rollouts(setup, steps=steps))


def rollouts(
    setup: Setup, *, steps: int, vary: Callable[[Workload], Workload] | None = None
) -> list[float]:
    """Return the seconds of `rollout_s` for each batch."""
    return [float(first_step(setup, seed=seed, vary=vary).steps[0]["at"]) for seed in range(steps)]


class Ratio(NamedTuple):
    """The ratio of two means over the same seeds, and the range of the seeds' ratios;
    None with one seed.
    """

    mean: float
    seeds: tuple[float, float] | None


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the mean of `above` over that of `below`, where values at the same place
    have the same seed.
    """
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    return Ratio(statistics.fmean(above) / statistics.fmean(below), span(ratios))


def first_step(
    setup: Setup, *, seed: int = 0, vary: Callable[[Workload], Workload] | None = None
) -> Outcome:
    """Simulate one batch from an empty cluster. Raises ExperimentError."""
    return steps_of(setup, steps=1, seed=seed, vary=vary)


def steps_of(
    setup: Setup,
    *,
    steps: int,
    seed: int = 0,
    vary: Callable[[Workload], Workload] | None = None,
    watch: Journal | None = None,
    training: float = 1.0,
) -> Outcome:
    """Simulate this many steps of a run; `watch` receives every event, and training
    takes `training` times as long as by its costs.

    Raises ExperimentError.
    """
    work = {task: (vary or _as_it_is)(workload(task)) for task in setup.tasks}
    config = setup.config(steps=steps, seed=seed)
    outcome = simulate(
        config,
        costs=None if training == 1 else (costs_of(config)[0], Longer(setup, config, training)),
        work=work,
        watch=watch,
        rewards=setup.rewards(),
        serving=setup.serving_engines(),
    )
    if outcome.summary.error:
        raise ExperimentError(f"the run ended early: {outcome.summary.error}")
    return outcome


def _as_it_is(work: Workload) -> Workload:
    return work


class Longer(TrainerCost):
    """The trainer of a set-up on H800, whose steps take `factor` times as long."""

    def __init__(self, setup: Setup, config: RunConfig, factor: float) -> None:
        super().__init__(
            gpu=gpu("h800"),
            model=model(setup.model),
            gpus=setup.trainer_gpus,
            link=link(setup.link),
            passes=passes_of(config),
        )
        self._factor = factor

    def step_s(self, *, tokens: int, context: int) -> float:
        return self._factor * super().step_s(tokens=tokens, context=context)


class Transfer:
    """A version of the weights on its way: when the trainer began to publish it, and
    when the last engine so far had it. `changes` is true if relays received changes
    alone.

    `pulls_s` are the seconds in which engines received it while they served, and
    `waits_s` those for which engines were suspended for it.
    """

    def __init__(self, began: float) -> None:
        self.began = self.loaded = began
        self.changes = False
        self.pulls_s: list[float] = []
        self.waits_s: list[float] = []

    @property
    def seconds(self) -> float:
        return self.loaded - self.began


class Watched:
    """A simulated run, for inspection while its weights travel.

    `stall_s` are the seconds for which the trainer waited at each publication.
    """

    def __init__(self, config: RunConfig, *, costs: Costs | None = None) -> None:
        metrics = SimMetrics()
        self.world = World(config, observer=metrics, journal=self, costs=costs)
        metrics.watch(self.world)
        self.stall_s: list[float] = []
        self.transfers: dict[int, Transfer] = {}  # by version
        self._versions: dict[int, int] = {}  # publication id → version
        self._staging: dict[tuple[str, int], float] = {}
        self._suspended: dict[str, float] = {}
        self.world.start()

    def append(self, now: float, event: e.Event, commands: Sequence[c.Command]) -> None:
        """Note when engines and trainer begin to wait, and when they continue."""
        if isinstance(event, e.WeightsPublished):
            self.stall_s.append(now - self.transfers[event.version].began)
        elif isinstance(event, e.WeightsLoaded):
            transfer = self.transfers[event.version]
            transfer.loaded = now
            if event.engine_id in self._suspended:
                transfer.waits_s.append(now - self._suspended.pop(event.engine_id))
        elif isinstance(event, e.WeightsStaged):
            transfer = self.transfers[self._versions[event.publication_id]]
            began = self._staging.pop((event.engine_id, event.publication_id), now)
            transfer.pulls_s.append(now - began)
        for command in commands:
            if isinstance(command, c.PublishWeights):
                self.transfers[command.version] = Transfer(now)
                self._versions[command.publication_id] = command.version
            elif isinstance(command, c.FetchWeights) and command.base_id is not None:
                self.transfers[self._versions[command.publication_id]].changes = True
            elif isinstance(command, c.StageWeights):
                self._staging[command.engine_id, command.publication_id] = now
            elif isinstance(command, c.SuspendEngine):
                self._suspended[command.engine_id] = now
            elif isinstance(command, c.RestartEngine):
                self._suspended.pop(command.engine_id, None)

    @property
    def waits_s(self) -> list[float]:
        """Return the seconds for which engines were suspended for any version."""
        return [wait for transfer in self.transfers.values() for wait in transfer.waits_s]

    def until_published(self, version: int) -> float:
        """Run until this version is published. Returns the time of that."""
        publication = self.world.core.state.publication
        run_until(self.world, lambda: publication.version >= version)
        return publication.at

    def until_broadcast(self, *, without: str = "") -> float:
        """Run until every relay but that one has the published weights. Returns the
        seconds since their publication.
        """
        state = self.world.core.state
        published, part = state.publication.id, part_of(state)
        assert part is not None, "these clusters have relays"

        def everywhere() -> bool:
            relays = [relay for relay in part.relays.values() if relay.id != without]
            return all(published in relay.versions for relay in relays)

        run_until(self.world, everywhere)
        return self.world.clock.now - state.publication.at

    def finish(self) -> None:
        """Run to the end. Raises ExperimentError."""
        run_to_end(self.world)


def run_until(world: World, condition: Callable[[], bool]) -> None:
    """Run until the condition holds. Raises ExperimentError if the run ends before."""
    while not condition():
        if world.over is not None:
            raise ExperimentError(f"the run ended early: {world.over}")
        world.step()


def run_to_end(world: World) -> None:
    """Run to the end. Raises ExperimentError if it is an error."""
    while world.over is None:
        world.step()
    if world.over:
        raise ExperimentError(f"the run ended early: {world.over}")


# Changes of a workload.


class GaussianSteps:
    """Every call of the environment takes a normally distributed number of seconds, at
    least 0 (RollArt Fig. 11b).
    """

    def __init__(self, work: Workload, *, mean_s: float, sigma_s: float) -> None:
        self._work, self._mean, self._sigma = work, mean_s, sigma_s

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        plan = self._work.plan(index=index, member=member, attempt=attempt, seed=seed)
        rng = random.Random(f"gaussian/{seed}/{index}/{member}/{attempt}")
        return msgspec.structs.replace(
            plan,
            turns=tuple(
                msgspec.structs.replace(turn, env_s=max(0.0, rng.gauss(self._mean, self._sigma)))
                for turn in plan.turns
            ),
        )


class ScaledSteps:
    """Every call of the environment takes `factor` times as long."""

    def __init__(self, work: Workload, *, factor: float) -> None:
        self._work, self._factor = work, factor

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        plan = self._work.plan(index=index, member=member, attempt=attempt, seed=seed)
        turns = tuple(
            msgspec.structs.replace(turn, env_s=turn.env_s * self._factor) for turn in plan.turns
        )
        return msgspec.structs.replace(plan, turns=turns)


class NarrowOutputs:
    """The agent's outputs have `factor` of their spread, on a logarithmic scale, and
    the same mean.
    """

    SAMPLED = 300
    """Number of trajectories from which the mean is computed."""

    def __init__(self, work: Workload, *, factor: float) -> None:
        self._work, self._factor = work, factor
        plans = (
            work.plan(index=index, member=0, attempt=0, seed=0) for index in range(self.SAMPLED)
        )
        outputs = [turn.output_tokens for plan in plans for turn in plan.turns]
        narrow = statistics.fmean(output**factor for output in outputs)
        self._scale = statistics.fmean(outputs) / narrow

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        plan = self._work.plan(index=index, member=member, attempt=attempt, seed=seed)
        turns = tuple(
            msgspec.structs.replace(
                turn, output_tokens=max(1, round(self._scale * turn.output_tokens**self._factor))
            )
            for turn in plan.turns
        )
        return msgspec.structs.replace(plan, turns=turns)


class SlowStarts:
    """A share `rate` of the environments starts `seconds` late: RollArt's long
    initialization failures, in which image pulls are retried until they succeed (§8).
    """

    def __init__(self, work: Workload, *, rate: float, seconds: float) -> None:
        self._work, self._rate, self._seconds = work, rate, seconds

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        plan = self._work.plan(index=index, member=member, attempt=attempt, seed=seed)
        chance = random.Random(f"slow/{seed}/{index}/{member}/{attempt}").random()
        return (
            msgspec.structs.replace(plan, init_s=plan.init_s + self._seconds)
            if chance < self._rate
            else plan
        )


def mean_of(count: int, what: str) -> str:
    """Describe a mean, for a note."""
    return f"one {what}" if count == 1 else f"mean of {count} {what}s"


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of ratios."""
    return math.exp(statistics.fmean(map(math.log, values)))
