"""Heddle's cluster, the compared systems, and the measurements of their runs.

A run is synchronous training of a few steps. The first one trains the predictor and
gives the allocation its lengths; it is not measured. Of the later ones only the rollout
counts, from the time when the environments would be ready until the last reward, so it
contains neither training nor new weights nor restarting engines.
"""

import functools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, Struct, TrajectoryId
from rollweave_papers.cluster import Setup, SlowStarts, mean_of, steps_of
from rollweave_sim.families import FAMILIES
from rollweave_sim.workload import Workload

GPUS = 64
"""Eight machines of eight Hopper GPUs with NVLink of 900 GB/s (Heddle §7): h100."""

MEMBERS = 16
"""Samples of a prompt (Heddle §7)."""

WORKER_BATCH = 100
"""Concurrent trajectories on a worker of the baselines (Heddle §7.1); the global batch
is that of all workers.
"""

MODELS = {"qwen3-8b": 1, "qwen3-14b": 1, "qwen3-32b": 2}
"""Model → GPUs of a baseline's worker (Heddle §7.1)."""

STUDIED = "qwen3-14b"
"""Model of the ablations (Heddle §7.2 to 7.4)."""

TASKS = ("coding", "search", "math")

DEGREES = (1, 2, 4, 8)
"""GPUs of a worker among which allocation chooses, where the model fits: §6 leaves them
open; at most those of a machine.
"""


class System(Struct, frozen=True, kw_only=True):
    """The policies in which Heddle's systems differ."""

    priority: str
    placement: str
    migration: str = "never"

    def but(self, **changes: str) -> "System":
        """Return a copy with `changes`."""
        return msgspec.structs.replace(self, **changes)


VERL = System(priority="round_robin", placement="pinned")
HYBRID = VERL.but(placement="hybrid")
SLIME = VERL.but(placement="least_load")
OURS = System(priority="longest_first", placement="partition", migration="gain")
PAPERS = OURS.but(placement="presorted", migration="rank")

READY_S = 300.0
"""Seconds until the first environment is ready. Engines load their first weights one
after the other, and the first one ready would get entire groups, hard ones among them;
those of a new plan are started earlier. The seconds are subtracted again.
"""


class Rollout(Struct, frozen=True, kw_only=True):
    """Means over the measured steps: seconds, sampled tokens per second of the entire
    cluster, and seconds that the longest trajectory waited for a slot. `fleet` are the
    final engines by degree.
    """

    seconds: float
    tokens_per_s: float
    longest_queued_s: float
    fleet: str


class Watch:
    """Records by step when environments began to start, tokens of trajectories, and how
    long their turns waited.
    """

    def __init__(self) -> None:
        self.began: list[float] = []
        self.tokens: list[Counter[TrajectoryId]] = []
        self.queued: list[defaultdict[TrajectoryId, float]] = []
        self.engines: dict[EngineId, int] = {}
        self._over = True
        self._requested: dict[TrajectoryId, float] = {}

    def append(self, now: float, event: e.Event, commands: Sequence[c.Command]) -> None:
        """Record an event and the core's commands."""
        match event:
            case e.RunStarted():
                self.engines = {slot.id: slot.degree for slot in event.engines}
            case e.TurnRequested():
                self._requested[event.trajectory_id] = now
            case e.TurnDone():
                self.tokens[-1][event.trajectory_id] += event.output_tokens
                self.queued[-1][event.trajectory_id] += event.queue_s
        for command in commands:
            match command:
                case c.StartTurn():
                    self.queued[-1][command.trajectory_id] += (
                        now - self._requested[command.trajectory_id]
                    )
                case c.StartInit() if self._over:
                    self._over = False
                    self.began.append(now)
                    self.tokens.append(Counter())
                    self.queued.append(defaultdict(float))
                case c.TrainStep():
                    self._over = True
                case c.StartEngine():
                    self.engines[command.engine_id] = command.degree
                case c.RemoveEngine():
                    del self.engines[command.engine_id]

    def longest_queued_s(self, step: int) -> float:
        """Return the queueing seconds of the trajectory of the most tokens."""
        tokens = self.tokens[step]
        return self.queued[step][max(tokens, key=lambda one: (tokens[one], one))]


class Case(Struct, frozen=True, kw_only=True):
    """A run of one of `parts` parts of the cluster with its part of the batch.

    The first of its `steps` steps is not measured. Workers have `tp` GPUs, or sizes
    that the core decides if `adaptive`, and a slot for each of their trajectories where
    `slots` is 0.
    """

    task: str
    model: str
    system: System
    parts: int
    steps: int
    tp: int = 1
    slots: int = 0
    adaptive: bool = False

    @property
    def setup(self) -> Setup:
        """Return the set-up. The batch is the same for every `tp` (Heddle §7)."""
        gpus = max(GPUS // self.parts, self.tp)
        batch = WORKER_BATCH * (gpus // MODELS[self.model]) // MEMBERS * MEMBERS
        degrees = (
            tuple(degree for degree in DEGREES if MODELS[self.model] <= degree <= gpus)
            if self.adaptive
            else ()
        )
        # Every trajectory that the core assigns to a worker has a slot there.
        slots = (
            WORKER_BATCH * max(degrees)
            if degrees
            else max(WORKER_BATCH, -(-batch // (gpus // self.tp)))
        )
        return Setup(
            model=self.model,
            tasks=(self.task,),
            context=FAMILIES[self.task].max_context,
            rollout_gpus=gpus,
            trainer_gpus=GPUS,
            batch=batch,
            group_size=MEMBERS,
            gpu="h100",
            tp=self.tp,
            slots=self.slots or slots,
            policies=msgspec.structs.astuple(self.system),
            degrees=degrees,
        )

    def but(self, **changes: Any) -> "Case":
        """Return a copy with `changes`."""
        return msgspec.structs.replace(self, **changes)

    def describe(self) -> str:
        """Describe model and scale, for a note."""
        gpus = self.setup.rollout_gpus
        part = (
            f"{gpus} GPUs"
            if gpus == GPUS
            else f"{gpus} of {GPUS} GPUs with their part of the batch"
        )
        return f"{self.model}, {part}, {mean_of(self.steps - 1, 'step')} after the first"


@functools.cache
def rollout(case: Case) -> Rollout:
    """Simulate the case. Raises ExperimentError."""
    return measure(case.setup, steps=case.steps)


def measure(
    setup: Setup,
    *,
    steps: int,
    ready_s: float = READY_S,
    vary: Callable[[Workload], Workload] = lambda work: work,
) -> Rollout:
    """Simulate a set-up whose environments are ready after `ready_s`, which is not
    counted. `vary` changes its workload.

    Raises ExperimentError.
    """
    watch = Watch()
    outcome = steps_of(
        setup,
        steps=steps,
        vary=lambda work: SlowStarts(vary(work), rate=1.0, seconds=ready_s),
        watch=watch,
    )
    measured = range(1, steps)
    seconds = [outcome.steps[step]["at"] - watch.began[step] - ready_s for step in measured]
    tokens = sum(sum(watch.tokens[step].values()) for step in measured)
    fleet = sorted(Counter(watch.engines.values()).items())
    return Rollout(
        seconds=statistics.fmean(seconds),
        tokens_per_s=tokens / math.fsum(seconds) * GPUS / setup.rollout_gpus,
        longest_queued_s=statistics.fmean(watch.longest_queued_s(step) for step in measured),
        fleet=", ".join(f"{count}×{degree}" for degree, count in fleet),
    )
