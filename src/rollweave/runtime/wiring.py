"""The parts that every live world has, wired together under one task group: pump,
engines and rollout pipeline.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rollweave.core.core import Core
from rollweave.core.policy.waiting import Wait
from rollweave.engine.clients.base import Generates
from rollweave.record.journal import RunJournal
from rollweave.record.store import TrajectoryStore
from rollweave.record.trace import ENVIRONMENTS, Trace
from rollweave.record.turn_log import TurnLog
from rollweave.rollout.comparisons import Comparisons
from rollweave.rollout.driver import MakeEpisode
from rollweave.rollout.pipeline import Pipeline, WorkerPort
from rollweave.rollout.rewards import DomainRewards
from rollweave.rollout.teacher import Teach
from rollweave.rollout.worker import RolloutWorker
from rollweave.runtime.effects import Handlers, Timer, rollout_handlers
from rollweave.runtime.hosts.hosts import Hosts
from rollweave.runtime.manifests import Manifests
from rollweave.runtime.pump import Pump, RunClock
from rollweave.runtime.supervisors.engines import SLOW_S, EngineSupervisor
from rollweave.runtime.supervisors.workers import MakeWorker, WorkerSupervisor
from rollweave.runtime.tasks import Tasks
from rollweave.schema.commands import Command, StartInit, Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import EngineSlot
from rollweave.schema.images import ImageWait
from rollweave.schema.rollouts import ServiceWait
from rollweave.schema.serving import LoadCheckpoint

WAITING_PER_SLOT = 8
"""Number of rolled-out attempts that are remembered for each living environment: about
the length that the queue of rewards may reach.
"""


def waiting_limit(config: RunConfig) -> int:
    """Return the `waiting_limit` of `rollout/worker.py`."""
    return WAITING_PER_SLOT * config.rollout.max_running


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The parts that a live world is made from, and that outlive it."""

    config: RunConfig
    core: Core
    clock: RunClock
    journal: RunJournal
    store: TrajectoryStore
    trace: Trace
    hosts: Hosts
    make_engine: Callable[[EngineSlot, int], Generates]
    make_episode: MakeEpisode
    make_worker: MakeWorker
    image_waits: Callable[[], tuple[ImageWait, ...]] = tuple
    """Returns the images that the attempts in this process wait for."""
    teacher: Callable[[StartInit], Teach | None] = lambda _: None
    """Returns what asks the teacher of an attempt in this process, if it has one."""
    rewards_of: Callable[[str], DomainRewards | None] = lambda _: None
    """Returns the rewards of a task domain beside its environment's, if it has any."""
    service_waits: Callable[[], tuple[ServiceWait, ...]] = tuple
    """Returns the waits of this process for services."""
    turn_log: TurnLog | None = None
    """Records the turns of attempts under way, if a resumed run may continue these."""


class RolloutRuntime:
    """Pump, engines and rollout pipeline of one live world."""

    def __init__(
        self,
        wiring: Wiring,
        *,
        execute: Callable[[Command], None],
        warn: Callable[[Warn], None],
        keep_partial_turns: bool = False,
        relayed: bool = False,
        reply_s: float | None = None,
        checkpoint: Callable[[int, int], LoadCheckpoint] | None = None,
    ) -> None:
        """`execute` receives each command, and `warn` the warnings of workers.

        `keep_partial_turns` is as in `rollout/pipeline.py`; `reply_s` and `checkpoint`
        are as in `runtime/supervisors/engines.py`.
        """
        clock, self._wiring = wiring.clock.now, wiring
        self.tasks = Tasks()
        self.pump = Pump(wiring.core, journal=wiring.journal, clock=clock, execute=execute)
        self.manifests = Manifests(relayed=relayed)
        self.engines = EngineSupervisor(
            make=wiring.make_engine,
            tasks=self.tasks,
            post=self.pump.post,
            clock=clock,
            trace=wiring.trace,
            manifests=self.manifests,
            hosts=wiring.hosts,
            reply_s=reply_s,
            slow_s=max(SLOW_S, wiring.config.watchdog.turn_s / 2),
            checkpoint=checkpoint,
        )
        limit = waiting_limit(wiring.config)
        self.pipeline = Pipeline(
            worker=self._worker,
            engine=self.engines.backend,
            store=wiring.store,
            post=self.pump.post,
            clock=clock,
            spans=_EpisodeSpans(wiring.trace),
            waiting_limit=limit,
            keep_partial_turns=keep_partial_turns,
            log=wiring.turn_log,
        )
        self.comparisons = Comparisons(
            rewards_of=wiring.rewards_of,
            store=wiring.store,
            spawn=self.tasks.spawn,
            post=self.pump.post,
            clock=clock,
            spans=_EpisodeSpans(wiring.trace),
        )
        self.workers = WorkerSupervisor(
            make=wiring.make_worker,
            pipeline=self.pipeline,
            tasks=self.tasks,
            post=self.pump.post,
            warn=warn,
            clock=clock,
            trace=wiring.trace,
        )
        self._here = RolloutWorker(
            make_episode=wiring.make_episode,
            report=self.pipeline.on_report,
            spawn=self.tasks.spawn,
            clock=clock,
            waiting_limit=limit,
            teacher=wiring.teacher,
            rewards_of=wiring.rewards_of,
        )
        self._timer = Timer(clock, self.pump.post)
        self.error: str | None = None
        """The error of the run, or "", once the core has finished it."""

    def _worker(self, worker_id: str) -> WorkerPort | None:
        return self.workers.port(worker_id) if worker_id else self._here

    def handlers(self) -> Handlers:
        return rollout_handlers(
            pipeline=self.pipeline, engines=self.engines, workers=self.workers, timer=self._timer
        )

    def waits(self) -> list[Wait]:
        """Return what attempts wait for: images and services."""
        config, hosts = self._wiring.config, self._wiring.hosts

        def host_name(number: int) -> str:
            host = hosts.by_number.get(number) if config.cluster is not None else None
            return host.name if host is not None else ""

        here = [
            Wait(component=f"image {wait.image}", what=wait.what, since=wait.since)
            for wait in self._wiring.image_waits()
        ]
        here += [
            Wait(component=wait.service, what=wait.what, since=wait.since)
            for wait in self._wiring.service_waits()
        ]
        return [*here, *self.workers.image_waits(host_name), *self.workers.service_waits()]

    def finish(self, error: str) -> None:
        """Let the pump return: the core has finished the run."""
        self.error = error
        self._timer.cancel()
        self.pump.stop()


class _EpisodeSpans:
    """Writes the pipeline's spans as rows of the trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def episode_span(self, lane: str, name: str, start: float, end: float) -> None:
        self._trace.span(ENVIRONMENTS, lane, name, start, end, trajectory=lane)

    def episode_over(self, lane: str) -> None:
        self._trace.release(ENVIRONMENTS, lane)
