"""The rollouts of a service: accepts requests, resolves their tasks, passes them to the
core, and keeps their results.

Invariants: a request that was accepted ends in a result for each member, also if the
service is killed and started again on the same directory; submitting twice under one id
is the same as submitting once; what waits to begin is bounded, in number and in bytes;
only one task is drawn at a time, also when the client has disconnected, because task
sources are not thread-safe; a draw that takes too long is abandoned.
"""

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from rollweave.core.state import Stage
from rollweave.envs.tasks import TaskSource
from rollweave.record.store import TrajectoryStore
from rollweave.runtime.tasks import DRAW_S, on_thread
from rollweave.schema.base import DEPTH, TrajectoryId, is_deep
from rollweave.schema.commands import Deliver
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, CorruptJournalError, RollweaveError
from rollweave.schema.events import RolloutAcknowledged, RolloutCancelled, RolloutsSubmitted
from rollweave.schema.work import Limits, Purpose, Task
from rollweave_service.base import (
    ClosedError,
    ConflictError,
    FullError,
    GoneError,
    UnknownError,
    WorldPort,
)
from rollweave_service.jobs import Job, JobStore, Result
from rollweave_service.messages import (
    Completion,
    Completions,
    MemberStatus,
    RequestedLimits,
    RolloutPage,
    RolloutRequest,
    RolloutStatus,
)

STAGES = {
    Stage.QUEUED: "queued",
    Stage.INIT: "init",
    Stage.RUN_QUEUED: "run",
    Stage.RUN: "run",
    Stage.EVAL_QUEUED: "eval",
    Stage.EVAL: "eval",
}

PAGE_MEMBERS = 10_000
"""Approximate maximum number of members of all rollouts in one page: about a
megabyte.
"""

QUEUE = 10_000
"""Maximum number of rollouts that wait to start; more are refused."""

QUEUE_MB = 1024
"""Maximum MiB of requests and tasks that are not done; more are refused."""

KEPT_RESULTS = 100_000
"""Number of the newest finished rollouts whose results are kept."""

ANY = 0
"""Number under which calls wait for any completion: the numbers of jobs begin at 1."""

ROLLOUTS_AT_ONCE = 100
"""Number of rollouts that are handled between two yields to the event loop, which takes
some milliseconds.
"""

T = TypeVar("T")


class TaskResolver:
    def __init__(self, source: TaskSource) -> None:
        self._source = source
        self._drawing = asyncio.Lock()
        self._draws: set[asyncio.Task[Task]] = set()

    async def resolve(self, request: RolloutRequest) -> Task:
        """Return the task of `request`, with its limits.

        Raises ConfigError for a payload that is too deep or an index that cannot be
        drawn.
        """
        if request.payload is not None:
            if is_deep(request.payload):
                raise ConfigError(f"payload must be at most {DEPTH} levels deep")
            payload = msgspec.json.encode(request.payload).decode()
            task = self._source.task_of(request.handler, payload=payload, seed=request.seed)
        else:
            task = await self._draw_alone(request)
        return msgspec.structs.replace(task, limits=_tightened(task.limits, request.limits))

    async def _draw_alone(self, request: RolloutRequest) -> Task:
        """Draw the task while no other is drawn. If the client disconnects, the draw
        still finishes before the next one begins.
        """
        await self._drawing.acquire()
        drawing = asyncio.create_task(self._draw(request), name=f"draw {request.handler}")
        self._draws.add(drawing)
        drawing.add_done_callback(self._forget_draw)
        return await asyncio.shield(drawing)

    async def _draw(self, request: RolloutRequest) -> Task:
        assert request.index is not None, "index or payload"
        draw = functools.partial(self._source.draw, request.handler, request.index, Purpose.SERVE)
        try:
            async with asyncio.timeout(DRAW_S):
                return await on_thread(draw, f"draw {request.handler}")
        except TimeoutError as error:
            raise ConfigError(
                f"index must be of a task that is drawn within {DRAW_S:g} s, got {request.index}"
            ) from error
        except RollweaveError as error:
            raise ConfigError(
                f"index must be of a task that can be drawn, got {request.index}: {error}"
            ) from error
        finally:
            self._drawing.release()

    def _forget_draw(self, drawing: asyncio.Task[Task]) -> None:
        self._draws.discard(drawing)
        if not drawing.cancelled():
            # mark the exception as retrieved: the client may have disconnected
            drawing.exception()


def _tightened(limits: Limits, requested: RequestedLimits) -> Limits:
    """Return the handler's limits, lowered where the request asks for less."""
    lowered = {
        name: min(value, getattr(limits, name))
        for name in requested.__struct_fields__
        if (value := getattr(requested, name)) is not None
    }
    return msgspec.structs.replace(limits, **lowered)


class RolloutManager:
    """Submits, cancels and reports rollouts. `waits_for` tells why rollouts wait for an
    engine.
    """

    def __init__(
        self,
        config: RunConfig,
        world: WorldPort,
        *,
        jobs: JobStore,
        source: TaskSource,
        store: TrajectoryStore,
        waits_for: Callable[[], str],
    ) -> None:
        self._config, self._world, self._jobs, self._store = config, world, jobs, store
        self._tasks = TaskResolver(source)
        self._waits_for = waits_for
        # what calls wait for: the end of a job, by its number, or any completion
        self._awaited: dict[int, asyncio.Event] = {}
        # the segment that the store was writing when unused ones were deleted last
        self._pruned_segment: int | None = None
        # members that are accepted, or about to be, and not yet in the core's queue
        self._submitting = 0
        self._cancelling: set[str] = set()
        self.ended = False
        """True if no further rollout will complete."""

    def restore(self) -> None:
        """Submit again the accepted rollouts that the core does not know. Call once the
        world runs.
        """
        known = self._world.state.groups
        for job in self._jobs.unfinished_jobs():
            if job.group_id not in known:
                self._post(job)

    def record(self, command: Deliver) -> None:
        """Store where the result is; then acknowledge it to the core, and wake all that
        wait for it.
        """
        entry = None
        if command.started and command.trajectory_id in self._store:
            entries = self._store.find([command.trajectory_id])
            entry = next((one for one in entries if one.attempt == command.attempt), None)
        result = self._jobs.record_result(
            command.trajectory_id,
            command.attempt,
            command.stop_reason,
            entry,
            keep=KEPT_RESULTS,
        )
        self._world.post(RolloutAcknowledged(trajectory_id=command.trajectory_id))
        if self._store.segment != self._pruned_segment:
            self._pruned_segment = self._store.segment
            self._store.discard(self._jobs.segments())
        if result is not None:
            self._wake(*(() if result.members_left else (result.job,)), ANY)

    def end(self) -> None:
        """Wake all that wait: no further rollout will complete."""
        self.ended = True
        self._wake(*self._awaited)

    def _wake(self, *awaited: int) -> None:
        for number in awaited:
            if (event := self._awaited.pop(number, None)) is not None:
                event.set()

    async def _wait(self, awaited: int, seconds: float) -> None:
        """Wait until `_wake` is called, or for `seconds`."""
        event = self._awaited.setdefault(awaited, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()

    # Requests.

    def environments(self) -> dict[str, str]:
        """Map each task domain for which rollouts may be requested to its environment
        or handler.
        """
        return {task.name: task.env for task in self._config.tasks}

    async def submit(self, requests: Sequence[RolloutRequest]) -> list[RolloutStatus]:
        """Accept all requests or none.

        Raises RefusedError, and ConfigError for a task that cannot be drawn.
        """
        self._check_open()
        named = [(request.id or f"auto-{secrets.token_hex(8)}", request) for request in requests]
        new: dict[str, RolloutRequest] = {}
        async for job_id, request in _yielding(named):
            earlier = new.get(job_id)
            if earlier is not None and earlier != request:
                raise ConflictError(
                    f"id must be new, or that of an equal request, got {job_id!r} twice"
                )
            if earlier is None and not self._is_known(job_id, request):
                new[job_id] = request
        members = sum(request.members for request in new.values())
        free = QUEUE - len(self._world.state.pools.queued) - self._submitting
        if members > free:
            raise FullError(
                f"at most {QUEUE} rollouts may wait to begin; {max(0, free)} more would fit"
            )
        self._submitting += members
        try:
            resolved = [
                (job_id, request, await self._resolve_task(request))
                async for job_id, request in _yielding(new.items())
            ]
            self._check_open()
            # another client may have submitted the same id during the wait
            unknown = [one for one in resolved if not self._is_known(one[0], one[1])]
            jobs = self._jobs.add(unknown, max_bytes=QUEUE_MB << 20)
            if jobs is None:
                used = self._jobs.unfinished_bytes / 2**20
                raise FullError(
                    f"unfinished requests may use at most {QUEUE_MB} MiB; {used:.1f} MiB are in use"
                )
            for job in jobs:
                self._post(job)
        finally:
            self._submitting -= members
        return [self.status(job_id, results=False) async for job_id, _ in _yielding(named)]

    def _check_open(self) -> None:
        if self._world.closed:
            raise ClosedError("the service is shutting down")

    def _is_known(self, job_id: str, request: RolloutRequest) -> bool:
        """Return whether this very request was accepted before. Raises
        ConflictError.
        """
        job = self._jobs.find(job_id)
        if job is not None and job.request != request:
            raise ConflictError(
                f"id must be new, or that of an equal request, got {job_id!r} again"
            )
        return job is not None

    async def _resolve_task(self, request: RolloutRequest) -> Task:
        names = self.environments()
        if request.handler not in names:
            raise UnknownError(
                f"handler must be one of {', '.join(names)}, got {request.handler!r:.100}"
            )
        return await self._tasks.resolve(request)

    def _post(self, job: Job) -> None:
        request = job.request
        event = RolloutsSubmitted(
            group_id=job.group_id,
            name=request.handler,
            task=job.task,
            members=request.members,
            decoding=request.sampling,
        )
        self._submitting += request.members
        self._world.post(event, functools.partial(self._on_queued, request.members))

    def _on_queued(self, members: int) -> None:
        self._submitting -= members

    def cancel(self, job_id: str) -> RolloutStatus:
        """Cancel all members that are not done; their results say `cancelled`.

        Raises UnknownError.
        """
        status = self.status(job_id, results=False)
        unfinished = [member.id for member in status.members if member.stage != "done"]
        # repeated calls must not fill the core's inbox
        if job_id not in self._cancelling and unfinished:
            self._cancelling.add(job_id)
            for name in unfinished[:-1]:
                self._world.post(RolloutCancelled(trajectory_id=name))
            self._world.post(
                RolloutCancelled(trajectory_id=unfinished[-1]),
                lambda: self._cancelling.discard(job_id),
            )
        return status

    # Status and results.

    def status(self, job_id: str, *, results: bool) -> RolloutStatus:
        """Return the status of a rollout; with `results`, including the trajectories of
        members that are done.

        Raises UnknownError, GoneError.
        """
        return self._status(self._find(job_id), results=results)

    async def page(self, after: int, *, limit: int, unfinished: bool) -> RolloutPage:
        """Return rollouts without results, after number `after`, in order of
        acceptance: at most `limit` of them, and fewer if they have many members.
        """
        statuses: list[RolloutStatus] = []
        members = 0
        async for job in _yielding(self._jobs.jobs_after(after, limit, unfinished=unfinished)):
            members += job.request.members
            if statuses and members > PAGE_MEMBERS:
                break
            statuses.append(self._status(job, results=False))
            after = job.number
        return RolloutPage(rollouts=tuple(statuses), next=after)

    async def wait(self, job_id: str, seconds: float) -> RolloutStatus:
        """Return `status` with results, once the rollout is done or after `seconds`.

        Raises UnknownError, GoneError.
        """
        job = self._jobs.find(job_id)
        if job is not None and job.members_left and seconds > 0:
            await self._wait(job.number, seconds)
        return self.status(job_id, results=True)

    async def completions(
        self, after: int, *, limit: int, seconds: float, rollout: str | None = None
    ) -> Completions:
        """Return members that were done after number `after`; if there are none, wait
        for one for at most `seconds`.

        With `rollout`, return only members of that rollout, and do not wait once all of
        them are done. Raises UnknownError.
        """
        job = self._find(rollout).number if rollout is not None else None
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            results = self._jobs.results_after(after, limit, job=job)
            remaining_s = deadline - asyncio.get_running_loop().time()
            if (
                results
                or remaining_s <= 0
                or self.ended
                or (rollout is not None and not self._is_under_way(rollout))
            ):
                completions = tuple(
                    Completion(
                        number=result.number,
                        rollout=self._jobs.id_of(result.job) or "",
                        member=result.member,
                        stop_reason=result.stop_reason,
                    )
                    for result in results
                )
                last = results[-1].number if results else after
                return Completions(completions=completions, next=last)
            await self._wait(ANY, remaining_s)

    def last_completion(self) -> int:
        """Return the number of the newest completion; 0 before the first."""
        return self._jobs.last_result_number()

    def _find(self, job_id: str) -> Job:
        job = self._jobs.find(job_id)
        if job is None:
            raise UnknownError(f"no rollout has the id {job_id!r:.100}")
        return job

    def _is_under_way(self, job_id: str) -> bool:
        job = self._jobs.find(job_id)
        return job is not None and job.members_left > 0

    def _status(self, job: Job, *, results: bool) -> RolloutStatus:
        done = {result.member: result for result in self._jobs.results_of(job.number)}
        members = []
        for number in range(job.request.members):
            name = TrajectoryId(f"{job.group_id}.{number}")
            members.append(
                self._done_member(done[name], results)
                if name in done
                else self._unfinished_member(name)
            )
        is_running = any(member.stage != "queued" for member in members)
        state = "done" if len(done) == len(members) else "running" if is_running else "queued"
        return RolloutStatus(
            id=job.id,
            handler=job.request.handler,
            state=state,
            members=tuple(members),
            waits_for=self._waits_for() if state != "done" else "",
        )

    def _done_member(self, result: Result, with_trajectory: bool) -> MemberStatus:
        trajectory = None
        if with_trajectory and result.entry is not None:
            try:
                trajectory = self._store.read([result.entry])[0]
            except (OSError, CorruptJournalError, msgspec.MsgspecError) as error:
                # a file of the store was deleted or damaged
                raise GoneError(
                    f"the trajectory of {result.member} can no longer be read: {error}"
                ) from error
        return MemberStatus(
            id=result.member,
            stage="done",
            attempt=result.attempt,
            stop_reason=result.stop_reason,
            result=trajectory,
        )

    def _unfinished_member(self, name: TrajectoryId) -> MemberStatus:
        trajectory = self._world.state.trajectories.get(name)
        if trajectory is None:
            return MemberStatus(id=name, stage="queued", attempt=0)
        # a trajectory that has ended, but whose result is not stored yet, is still in
        # eval
        return MemberStatus(
            id=name, stage=STAGES.get(trajectory.stage, "eval"), attempt=trajectory.attempt
        )


async def _yielding(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield all items, and let other tasks run after every few, so that thousands of
    items do not block the event loop.
    """
    for number, item in enumerate(items):
        if number % ROLLOUTS_AT_ONCE == 0:
            await asyncio.sleep(0)
        yield item
