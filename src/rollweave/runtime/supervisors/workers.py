"""Execute the core's commands about rollout workers, and report the results; and the
link to the process of one worker, on this host or another.

Invariants: those of `runtime/supervisors/supervisor.py`; the ends of a lost worker's
attempts are stored before its loss is reported, and no report is delivered after it; a
requested task is drawn even if the worker that was to draw it is lost.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollweave.core.policy.images import Grants, ImageDirectory
from rollweave.core.policy.waiting import Wait
from rollweave.io.child import Spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.record.trace import WORKERS, Trace
from rollweave.rollout.pipeline import Pipeline
from rollweave.runtime.supervisors.supervisor import ProcessLink, Supervised, TracedSupervisor
from rollweave.runtime.tasks import Tasks
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.commands import DrawTask, RemoveWorker, RestartWorker, Warn
from rollweave.schema.errors import RollweaveError
from rollweave.schema.events import (
    DrawFailed,
    Event,
    GroupSubmitted,
    WorkerJoined,
    WorkerLost,
    WorkerSlot,
)
from rollweave.schema.images import AskImage, HoldImage, ImageWait, MissImage
from rollweave.schema.rollouts import (
    BEAT_S,
    PhaseEnded,
    RolloutWorkerCommand,
    ServiceWait,
    StopRolloutWorker,
    WorkerBeat,
    WorkerReady,
    WorkerReport,
    WorkerSpec,
    WorkerWarned,
)

SILENT_S = 30.0
"""Seconds without a heartbeat after which a worker counts as lost, and is killed:
longer than code of an environment should ever block the event loop.
"""

CLOSE_S = 8.0
"""Maximum time for a worker to end its attempts and sandboxes, in seconds."""

_decode = decoder_of(WorkerReport)


class RolloutWorkerLostError(RollweaveError):
    """The worker's process has ended, or was killed because it was silent."""


OnReport = Callable[[WorkerReport], None]


class WorkerLink(ProcessLink[WorkerReady]):
    """The link to one worker, a process whose first frame is a `WorkerSpec`."""

    def __init__(
        self,
        spec: WorkerSpec,
        on_report: OnReport,
        *,
        spawn: Spawn,
        log: Path,
        start_s: float,
        silent_s: float | None = None,
    ) -> None:
        super().__init__(
            "worker",
            spec.id,
            spec,
            spawn=spawn,
            log=log,
            start_s=start_s,
            stop=StopRolloutWorker(),
            close_s=CLOSE_S,
            lost_error=RolloutWorkerLostError,
        )
        self._on_report = on_report
        self._silent_s = silent_s if silent_s is not None else SILENT_S
        self.failure: Exception | None = None
        """The exception that the handling of a report raised; the worker was then
        killed.
        """
        self._missed = 0
        """Number of missed heartbeats in a row."""
        self._received = False
        """True if a frame has arrived since the last tick."""

    def send(self, command: RolloutWorkerCommand) -> None:
        """Send a command, in order. It is dropped if the worker is gone."""
        if not self.lost.done():
            self._child.send(encode(command))

    def _on_frame(self, payload: bytes) -> None:
        self._received = True
        report = _decode(payload)
        if isinstance(report, WorkerReady):
            self._timer.cancel()
            self._tick()
            if not self._ready.done():
                self._ready.set_result(report)
            return
        try:
            self._on_report(report)
        except Exception as error:
            self.failure = self.failure or error
            self._give_up(f"sent a report that cannot be handled: {error}")

    def _tick(self) -> None:
        """Count a missed heartbeat, unless a frame has arrived since the last tick."""
        self._missed = 0 if self._received else self._missed + 1
        self._received = False
        if self._missed * BEAT_S >= self._silent_s:
            self._give_up(f"sent nothing for {self._silent_s:g} s")
            return
        self._timer = self._loop.call_later(BEAT_S, self._tick)


MakeWorker = Callable[[str, int, OnReport], WorkerLink]
"""Starts the process of a worker on the host of this number. Raises OSError."""


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerProcess(Supervised[WorkerLink]):
    """One epoch of one worker."""

    host: int
    offset_s: float | None = None
    """Run time at which its clock was 0; None until it is ready."""
    images: tuple[ImageWait, ...] = ()
    """The images that it waits for, by its own clock."""
    services: tuple[ServiceWait, ...] = ()
    """Its waits for services, by its own clock."""

    @property
    def key(self) -> str:
        return f"{self.name}.{self.epoch}"


@dataclass(slots=True)
class _Draw:
    command: DrawTask
    worker: WorkerProcess | None = None


class WorkerSupervisor(TracedSupervisor[WorkerProcess, WorkerReady]):
    """All rollout workers of a world, w0, w1, and so on."""

    category = WORKERS

    def __init__(
        self,
        *,
        make: MakeWorker,
        pipeline: Pipeline,
        tasks: Tasks,
        post: Callable[[Event], None],
        warn: Callable[[Warn], None],
        clock: Callable[[], float],
        trace: Trace,
    ) -> None:
        super().__init__(tasks=tasks, post=post, clock=clock, trace=trace)
        self._make, self._pipeline, self._warn = make, pipeline, warn
        self._draws: dict[GroupId, _Draw] = {}
        self._images = ImageDirectory()
        self._asking: dict[str, WorkerProcess] = {}
        """The workers that have asked for images, by their keys."""

    def start(self, slots: Iterable[WorkerSlot]) -> None:
        """Start epoch 0 of each worker, at the beginning of a life."""
        for slot in slots:
            self._begin(WorkerProcess(name=slot.id, epoch=0, host=slot.host))

    def restart(self, command: RestartWorker) -> None:
        self._forsake(self._processes.get(command.worker_id), command.reason)
        self._begin(WorkerProcess(name=command.worker_id, epoch=command.epoch, host=command.host))

    def remove(self, command: RemoveWorker) -> None:
        worker = self._processes.get(command.worker_id)
        in_order = worker is not None and _works(worker)
        self._forsake(self._remove(command.worker_id, in_order=in_order), command.reason)

    def port(self, worker_id: str) -> WorkerLink | None:
        """Return the link to a worker; None if it takes no attempts."""
        worker = self._processes.get(worker_id)
        return worker.link if worker is not None and _works(worker) else None

    def image_waits(self, host_name: Callable[[int], str]) -> list[Wait]:
        """Return the images that hosts wait for, each once a host."""
        waits = [(worker, wait) for worker in self._processes.values() for wait in worker.images]
        first: dict[tuple[str, int], Wait] = {}
        for worker, wait in sorted(waits, key=lambda one: one[1].behind):
            name = host_name(worker.host)
            first.setdefault(
                (wait.image, worker.host),
                Wait(
                    component=f"image {wait.image}{f' on host {name}' if name else ''}",
                    what=wait.what,
                    since=wait.since + (worker.offset_s or 0.0),
                ),
            )
        return list(first.values())

    def service_waits(self) -> list[Wait]:
        """Return the waits of each worker for services."""
        return [
            Wait(
                component=f"{wait.service} of worker {worker.name}",
                what=wait.what,
                since=wait.since + (worker.offset_s or 0.0),
            )
            for worker in self._processes.values()
            for wait in worker.services
        ]

    def draw(self, command: DrawTask) -> None:
        """Let a worker draw the task, as soon as one is ready."""
        self._draws[command.group_id] = _Draw(command)
        self._assign_draws()

    async def _open(self, worker: WorkerProcess) -> WorkerReady:
        worker.link = self._make(
            worker.name, worker.host, lambda report: self._on_report(worker, report)
        )
        return await worker.link.ready()

    def _on_ready(self, worker: WorkerProcess, ready: WorkerReady) -> None:
        worker.offset_s = self._clock() - ready.now
        super()._on_ready(worker, ready)
        self._post(WorkerJoined(worker_id=worker.name, epoch=worker.epoch))
        self._assign_draws()

    async def _until_lost(self, worker: WorkerProcess) -> str:
        reason = await super()._until_lost(worker)
        if worker.link is not None and worker.link.failure is not None:
            raise worker.link.failure  # a disk that is full, or a bug of ours
        return reason

    def _on_report(self, worker: WorkerProcess, report: WorkerReport) -> None:
        match report:
            case GroupSubmitted() | DrawFailed():
                draw = self._draws.get(report.group_id)
                if draw is not None and draw.worker is worker:
                    del self._draws[report.group_id]
                    self._post(report)
            case WorkerWarned(component=component, message=message):
                self._warn(Warn(component=component, message=message))
            case AskImage():
                if not worker.retired:
                    self._asking[worker.key] = worker
                    self._send_grants(self._images.on_asked(worker.key, report))
            case HoldImage():
                if not worker.retired:
                    self._send_grants(self._images.on_held(worker.key, report))
            case MissImage():
                self._send_grants(self._images.on_missed(worker.key, report))
            case WorkerBeat(images=images, services=services):
                worker.images, worker.services = images, services
            case WorkerReady():
                pass
            case PhaseEnded(start=start, end=end):
                offset = worker.offset_s or 0.0
                self._pipeline.on_report(
                    msgspec.structs.replace(report, start=start + offset, end=end + offset)
                )
            case _:
                self._pipeline.on_report(report)

    def _on_lost(self, worker: WorkerProcess, error: Exception | str) -> None:
        super()._on_lost(worker, error)
        recorded = self._forsake(worker, str(error))
        self._post(
            WorkerLost(
                worker_id=worker.name, epoch=worker.epoch, error=str(error), recorded=recorded
            )
        )

    def _forsake(self, worker: WorkerProcess | None, reason: str) -> tuple[TrajectoryId, ...]:
        """End the worker's attempts, and assign its draws to others. Return the
        trajectories whose attempts may be continued.
        """
        recorded: tuple[TrajectoryId, ...] = ()
        if worker is None:
            return recorded
        worker.retired, worker.images = True, ()
        self._asking.pop(worker.key, None)
        self._send_grants(self._images.on_lost(worker.key))
        if worker.link is not None:
            recorded = self._pipeline.lose_worker(worker.link, reason)
        for draw in self._draws.values():
            if draw.worker is worker:
                draw.worker = None
        self._assign_draws()
        return recorded

    def _send_grants(self, grants: Grants) -> None:
        for key, grant in grants:
            worker = self._asking[key]
            assert worker.link is not None, "it has asked"
            worker.link.send(grant)

    def _assign_draws(self) -> None:
        waiting = [draw for draw in self._draws.values() if draw.worker is None]
        working = [worker for worker in self._processes.values() if _works(worker)]
        if not working:
            return
        drawing = [draw.worker for draw in self._draws.values()]
        for draw in waiting:
            draw.worker = min(working, key=drawing.count)
            drawing.append(draw.worker)
            assert draw.worker.link is not None, "it works"
            draw.worker.link.send(draw.command)


def _works(worker: WorkerProcess) -> bool:
    """Return whether the worker is ready, and not lost."""
    return (
        worker.link is not None
        and worker.offset_s is not None
        and not worker.retired
        and not worker.link.lost.done()
    )
