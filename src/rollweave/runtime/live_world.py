"""The parts that every live world has, under one task group: pump, engines, rollout
pipeline and predictor of lengths.

Invariants: however a world ends (by the core's `Finish`, an error or a cancellation),
all its tasks, environments and processes end before it returns; an error that neither
the user nor the core caused passes through; a result that is to be delivered is in the
store before its delivery is announced.
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from rollweave.core.policy.scheduling import scheduling
from rollweave.core.policy.waiting import Wait
from rollweave.io.disk import replace_file
from rollweave.record.trace import ENVIRONMENTS, Trace
from rollweave.rollout.pipeline import Pipeline, WorkerPort
from rollweave.rollout.rewards import Comparisons
from rollweave.rollout.worker import RolloutWorker
from rollweave.runtime.life import Wiring
from rollweave.runtime.processes import waiting_limit
from rollweave.runtime.pump import Effects, Handlers, Pump, Timer
from rollweave.runtime.supervisors.engines import SLOW_S, EngineSupervisor, Manifests
from rollweave.runtime.supervisors.predictor import PredictorSupervisor
from rollweave.runtime.supervisors.workers import WorkerSupervisor
from rollweave.runtime.tasks import Tasks
from rollweave.schema import commands as c
from rollweave.schema.base import as_json
from rollweave.schema.errors import DiskError
from rollweave.schema.events import Event, RunStarted, WorldLost
from rollweave.schema.serving import LoadCheckpoint
from rollweave.schema.status import STATUS_S, RunStatus


class LiveWorld:
    """A world without what is particular to a run or to a service, each of which is a
    subclass.
    """

    effects: Effects
    """Executes the core's commands; a subclass sets it."""

    def __init__(
        self,
        wiring: Wiring,
        *,
        warn: Callable[[c.Warn], None],
        keep_partial_turns: bool = False,
        relayed: bool = False,
        reply_s: float | None = None,
        checkpoint: Callable[[int, int], LoadCheckpoint] | None = None,
    ) -> None:
        """`warn` receives the warnings of the world's parts. `keep_partial_turns` is as
        in `rollout/pipeline.py`; with it, engines also report their KV. `relayed`,
        `reply_s` and `checkpoint` are as in `runtime/supervisors/engines.py`.
        """
        life, episodes, processes = wiring.life, wiring.episodes, wiring.processes
        self.config, self.life, self._episodes, self._warn = life.config, life, episodes, warn
        self.core, self._hosts = life.beginning.core, processes.hosts
        clock, self.tasks = life.clock.now, Tasks()
        self.pump = Pump(self.core, journal=life.journal, clock=clock, execute=self.execute)
        self.manifests = Manifests(relayed=relayed)
        self.engines = EngineSupervisor(
            make=wiring.make_engine,
            tasks=self.tasks,
            post=self.pump.post,
            clock=clock,
            trace=life.trace,
            manifests=self.manifests,
            hosts=processes.hosts,
            reply_s=reply_s,
            reports_kv=keep_partial_turns,
            slow_s=max(SLOW_S, self.config.watchdog.turn_s / 2),
            checkpoint=checkpoint,
        )
        limit = waiting_limit(self.config)
        self.pipeline = Pipeline(
            worker=self._worker,
            engine=self.engines.backend,
            store=life.store,
            post=self.pump.post,
            clock=clock,
            spans=_EpisodeSpans(life.trace),
            waiting_limit=limit,
            keep_partial_turns=keep_partial_turns,
            log=life.turn_log,
        )
        self.comparisons = Comparisons(
            rewards_of=episodes.rewards_of,
            store=life.store,
            spawn=self.tasks.spawn,
            post=self.pump.post,
            clock=clock,
            spans=_EpisodeSpans(life.trace),
        )
        self.workers = WorkerSupervisor(
            make=processes.worker,
            pipeline=self.pipeline,
            tasks=self.tasks,
            post=self.pump.post,
            warn=warn,
            clock=clock,
            trace=life.trace,
        )
        self._here = RolloutWorker(
            make_episode=episodes.make,
            report=self.pipeline.on_report,
            spawn=self.tasks.spawn,
            clock=clock,
            waiting_limit=limit,
            teacher=episodes.teacher,
            rewards_of=episodes.rewards_of,
        )
        self.predictor = PredictorSupervisor(
            processes.predictor, tasks=self.tasks, post=self.pump.post, warn=warn
        )
        self.predicts = scheduling(self.config.rollout, self.config.ablation).predicts
        self._timer = Timer(clock, self.pump.post)
        self._status = StatusFile(life.run.status, self._now)
        self.error: str | None = None
        """The error of the run, or "", once the core has finished it."""

    def _worker(self, worker_id: str) -> WorkerPort | None:
        return self.workers.port(worker_id) if worker_id else self._here

    @property
    def post(self) -> Callable[[Event], None]:
        """Post an event from outside, such as the loss of a host."""
        return self.pump.post

    def handlers(self) -> Handlers:
        """Return the handlers that every live world has."""
        pipeline, engines = self.pipeline, self.engines
        return {
            c.StartInit: pipeline.start_init,
            c.StartRun: pipeline.start_run,
            c.StartTurn: pipeline.start_turn,
            c.AbortTurn: pipeline.abort_turn,
            c.RerankTurn: pipeline.rerank,
            c.StartEval: pipeline.start_eval,
            c.CancelTrajectory: pipeline.cancel,
            c.Evict: pipeline.evict,
            c.Migrate: self._migrate,
            c.StartEngine: engines.add,
            c.StageWeights: engines.stage,
            c.SuspendEngine: engines.suspend,
            c.LoadWeights: engines.load,
            c.ResumeEngine: engines.resume,
            c.RestartEngine: engines.restart,
            c.RemoveEngine: engines.remove,
            c.RestartWorker: self.workers.restart,
            c.RemoveWorker: self.workers.remove,
            c.Predict: self._predict,
            c.Harvest: self.predictor.harvest,
            c.FitPredictor: self.predictor.fit,
            c.SetTimer: self._timer.set,
            c.Warn: self._warn,
            c.Finish: self.finish,
        }

    def _migrate(self, command: c.Migrate) -> None:
        context = self.pipeline.context_of(command.trajectory_id, command.attempt)
        self.engines.migrate(command, context)

    def _predict(self, command: c.Predict) -> None:
        self.predictor.predict(command, self.pipeline.length_context(command))

    def execute(self, command: c.Command) -> None:
        """Execute a command of the core."""
        self.effects.execute(command)

    async def live(
        self, first: RunStarted | WorldLost, on_first: Callable[[], None] | None = None
    ) -> str:
        """Run from event `first` until the core issues `Finish`; return its error, or
        "". `on_first` is called once the core has handled `first`.
        """
        try:
            async with self.tasks:
                try:
                    self.pump.post(first, on_first)
                    self.engines.start(first.engines)
                    self.workers.start(first.workers)
                    if self.predicts:
                        self.predictor.start()
                    self.started(first)
                    self.tasks.spawn(self._status.keep(), "keep the status file")
                    await self.pump.run()
                    await asyncio.gather(
                        self.engines.close(), self.workers.close(), self.finished()
                    )
                finally:
                    await self.predictor.close()
                    self.tasks.cancel_all()
        finally:
            try:
                self._status.end()
            finally:
                await self._episodes.close()
        assert self.error is not None, "the pump ends with Finish"
        return self.error

    def started(self, first: RunStarted | WorldLost) -> None:
        """Start what a subclass has in addition, at the beginning of a life."""

    async def finished(self) -> None:
        """End in order what a subclass has in addition, once the core has finished."""

    def fetched(self) -> Mapping[str, tuple[int, int]]:
        """Return the progress of each fetching relay, as in `core/reading/waits.py`."""
        return {}

    def waits(self) -> list[Wait]:
        """Return what the core waits for, and what attempts do: images and services."""

        def host_name(number: int) -> str:
            host = self._hosts.by_number.get(number) if self.config.cluster is not None else None
            return host.name if host is not None else ""

        return [
            *self.core.waits(self.fetched(), start_s=self.config.watchdog.start_s),
            *(
                Wait(component=f"image {wait.image}", what=wait.what, since=wait.since)
                for wait in self._episodes.image_waits()
            ),
            *(
                Wait(component=wait.service, what=wait.what, since=wait.since)
                for wait in self._episodes.service_waits()
            ),
            *self.workers.image_waits(host_name),
            *self.workers.service_waits(),
        ]

    def _now(self) -> RunStatus:
        return self.core.status(self.life.clock.now(), self.waits())

    def rotate(self) -> None:
        """Replace the journal by a snapshot of the core, so that it stays small and
        replays quickly.
        """
        try:
            self.life.journal.rotate(self.core.snapshot())
        except OSError as error:  # the journal stays as it is
            self._warn(c.Warn(component="journal", message=f"cannot be compacted: {error}"))

    def finish(self, command: c.Finish) -> None:
        """Let the pump return: the core has finished the run."""
        self.error = command.error
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


class StatusFile:
    """The file at `path` with the state that `state` returns, while the run lives.

    Invariants: the file is replaced atomically, on a thread, and never synced, so that
    neither a reader nor a slow or full disk delays the run or ends it. The last state
    of a life says that it ended.
    """

    def __init__(self, path: Path, state: Callable[[], RunStatus]) -> None:
        self._path, self._state = path, state
        self._lock = threading.Lock()
        self._ended = False

    async def keep(self) -> None:
        """Write the state every `STATUS_S` seconds, until this task is cancelled."""
        while True:
            await asyncio.to_thread(self._write, self._state())
            await asyncio.sleep(STATUS_S)

    def end(self) -> None:
        """Write the last state of this life."""
        self._write(self._state(), ended=True)

    def _write(self, status: RunStatus, *, ended: bool = False) -> None:
        stamped = msgspec.structs.replace(
            status,
            written_at=round(time.time(), 3),
            machine=socket.gethostname(),
            pid=os.getpid(),
            ended=ended,
        )
        # a thread of `keep` may still write when the life ends; on a full disk, the
        # former state stays
        with self._lock, contextlib.suppress(DiskError):
            if ended or not self._ended:
                self._ended = ended
                replace_file(self._path, as_json(stamped), synced=False)
