"""Rollouts for whoever asks: takes requests, hands them to the core, keeps what came of
them.

Invariants: a request that was accepted ends in a result for each member, also if the
service is killed and started again on the same directory; asking twice with one id is
asking once; what waits to begin is bounded, in number and in bytes.
"""

import asyncio
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from rollweave.core.state import Engine as CoreEngine
from rollweave.core.state import EngineStatus as CoreEngineStatus
from rollweave.core.state import Stage, State
from rollweave.envs.tasks import TaskSource
from rollweave.record.store import TrajectoryStore
from rollweave.runtime.serving import ServiceWorld
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.commands import Deliver, Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import CorruptJournalError
from rollweave.schema.events import (
    EngineRegistered,
    EngineSlot,
    EngineWithdrawn,
    Event,
    RolloutAcknowledged,
    RolloutCancelled,
    RolloutsSubmitted,
)
from rollweave.schema.packing import as_json
from rollweave.schema.service import (
    Completion,
    EngineRequest,
    EngineStatus,
    MemberStatus,
    RolloutRequest,
    RolloutStatus,
)
from rollweave.schema.work import Task
from rollweave.service.jobs import Job, Jobs, Result, job_number
from rollweave.service.reach import EngineTokens
from rollweave.service.refusals import (
    ClosedError,
    ConflictError,
    FullError,
    GoneError,
    UnknownError,
)
from rollweave.service.tasks import Tasks

STAGES = {
    Stage.QUEUED: "queued",
    Stage.INIT: "init",
    Stage.RUN: "run",
    Stage.EVAL_QUEUED: "eval",
    Stage.EVAL: "eval",
}

REMOVED = "removed"
"""Status of a registered engine that failed too often."""

KEPT_WARNINGS = 64

FEW_ENGINES = 3
"""Maximum number of engines that one rollout's status names."""

LISTED_MEMBERS = 10_000
"""Approximate maximum number of members of all rollouts in one answer: about a
megabyte.
"""
MOST_ENGINES = 1024
"""Maximum number of engines that are registered at one time."""

FEW = 100
"""Rollouts of one request that are looked at in one go: some milliseconds."""

T = TypeVar("T")


class Service:
    """The life of a service between its doors and its world, which is `attach`ed before
    anything is asked.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        jobs: Jobs,
        tokens: EngineTokens,
        source: TaskSource,
        store: TrajectoryStore,
    ) -> None:
        self._config, self._jobs, self._engine_tokens, self._store = config, jobs, tokens, store
        self._tasks = Tasks(source)
        self._world: ServiceWorld | None = None
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._news = asyncio.Event()
        # the newest segment of the store when those that nobody needs were deleted last
        self._trimmed = -1
        # members that are accepted, or about to be, and that the core has not heard of
        self._submitting = 0
        self._cancelling: set[str] = set()
        self._addresses: dict[EngineId, EngineRequest] = {}
        self._offered: set[EngineId] = set()  # that the core has not heard of
        self._withdrawing: set[EngineId] = set()  # so too
        self._next_engine = 0
        self._troubles: dict[str, str] = {}  # engine → its latest problem
        self._unreachable: dict[EngineId, str] = {}  # engine → the reason that was logged last
        self._closed = self._ended = False
        self.warnings: list[Warn] = []
        self.on_warning: Callable[[Warn], None] = lambda _: None

    # The world.

    def attach(self, world: ServiceWorld) -> None:
        """Before it lives: a world that lives again begins with what it had delivered
        and nobody had noted.
        """
        self._world = world

    def go_on(self) -> None:
        """Once the world lives: what was accepted and the core has not heard of is said
        again, engines are registered again.
        """
        for job_id, why in self._jobs.forget_unreadable():
            self.warned(
                Warn(
                    component=f"rollout {job_id}",
                    message=f"is given up, its request cannot be read: {why}",
                )
            )
        for engine_id, blob in self._jobs.engines():
            try:
                request = msgspec.json.decode(blob, type=EngineRequest)
                token = self._engine_tokens.get(engine_id)
                self._offer(EngineId(engine_id), msgspec.structs.replace(request, token=token))
            except msgspec.ValidationError as error:  # noted under other rules
                self._jobs.erase_engine(engine_id)
                self._forget_engine(EngineId(engine_id))
                self.warned(
                    Warn(
                        component=engine_id, message=f"its registration is not taken over: {error}"
                    )
                )
        known = self._state.groups
        for job in self._jobs.unfinished():
            if job.group_id not in known:
                self._post_job(job)

    @property
    def _live(self) -> ServiceWorld:
        assert self._world is not None, "the world is attached first"
        return self._world

    @property
    def _state(self) -> State:
        return self._live.core.state

    def _post(self, event: Event) -> None:
        self._live.pump.post(event)

    def delivered(self, command: Deliver) -> None:
        """Keep the result's place; then tell the core, and whoever waits."""
        entry = None
        if command.started:
            found = (
                self._store.find([command.trajectory_id])
                if command.trajectory_id in self._store
                else []
            )
            entry = next((one for one in found if one.attempt == command.attempt), None)
        keep = self._config.serve.keep
        result = self._jobs.done(
            command.trajectory_id, command.attempt, command.stop_reason, entry, keep=keep
        )
        self._post(RolloutAcknowledged(trajectory_id=command.trajectory_id))
        if self._store.segment != self._trimmed:
            self._trimmed = self._store.segment
            self._store.discard(self._jobs.segments())
        if result is None:
            return
        for future in self._waiting.pop(result.job, []) if not result.left else ():
            if not future.done():
                future.set_result(None)
        self._tell()

    def warned(self, command: Warn) -> None:
        """Keep the newest, and say it."""
        if command.component in self._state.engines or command.component in self._addresses:
            self._troubles[command.component] = command.message
        self.warnings = [*self.warnings[-KEPT_WARNINGS + 1 :], command]
        self.on_warning(command)

    # Rollouts.

    async def submit(self, requests: Sequence[RolloutRequest]) -> list[RolloutStatus]:
        """Take all or none.

        Raises RefusedError, and ConfigError for a task that cannot be drawn.
        """
        if self._closed:
            raise ClosedError("the service is ending")
        named = [(request.id or f"auto-{secrets.token_hex(8)}", request) for request in requests]
        new: dict[str, RolloutRequest] = {}
        async for job_id, request in _in_turns(named):
            former = new.get(job_id)
            if former is not None and former != request:
                raise ConflictError(f"id must be new, or of an equal request, got {job_id!r} twice")
            if former is None and not self._known(job_id, request):
                new[job_id] = request
        count = sum(request.members for request in new.values())
        room = self._config.serve.queue - len(self._state.init_queue) - self._submitting
        if count > room:
            raise FullError(
                f"at most {self._config.serve.queue} rollouts may wait to begin; "
                f"there is room for {max(0, room)}"
            )
        self._submitting += count
        try:
            drawn = [
                (job_id, request, await self._asked(request))
                async for job_id, request in _in_turns(new.items())
            ]
            if self._closed:
                raise ClosedError("the service is ending")
            # somebody else may have been quicker
            fresh = [one for one in drawn if not self._known(one[0], one[1])]
            added = self._jobs.add(fresh, most_bytes=self._config.serve.queue_mb << 20)
            if added is None:
                owed, most = self._jobs.owed_bytes / 2**20, self._config.serve.queue_mb
                raise FullError(
                    f"requests may take {most} MiB until they are done "
                    f"(serve.queue_mb); {owed:.1f} MiB are taken"
                )
            for job in added:
                self._post_job(job)
        finally:
            self._submitting -= count
        return [self.status(job_id, results=False) async for job_id, _ in _in_turns(named)]

    @property
    def queue(self) -> int:
        """Maximum number of rollouts that may wait to begin."""
        return self._config.serve.queue

    def _known(self, job_id: str, request: RolloutRequest) -> bool:
        """True if just this was asked for before. Raises ConflictError."""
        job = self._jobs.find(job_id)
        if job is not None and job.request != request:
            raise ConflictError(f"id must be new, or of an equal request, got {job_id!r} again")
        return job is not None

    def _post_job(self, job: Job) -> None:
        request = job.request
        event = RolloutsSubmitted(
            group_id=job.group_id,
            name=request.handler,
            task=job.task,
            members=request.members,
            decoding=request.sampling,
        )
        self._submitting += request.members
        self._live.pump.post(event, functools.partial(self._heard, request.members))

    def _heard(self, members: int) -> None:
        """The core has these in its queue."""
        self._submitting -= members

    async def _asked(self, request: RolloutRequest) -> Task:
        names = self.handlers()
        if request.handler not in names:
            raise UnknownError(
                f"handler must be one of {', '.join(names)}, got {request.handler!r:.100}"
            )
        return await self._tasks.of(request)

    def status(self, job_id: str, *, results: bool) -> RolloutStatus:
        """Where it stands; with `results` all that is kept of members that are done.

        Raises UnknownError, GoneError.
        """
        return self._status(self._found(job_id), results=results)

    async def listed(
        self, after: int, *, limit: int, unfinished: bool
    ) -> tuple[list[RolloutStatus], int]:
        """Return rollouts without results, after number `after`, in order of
        acceptance; and the number of the last one.

        Returns at most `limit` of them, and fewer if they have many members.
        """
        found: list[RolloutStatus] = []
        members = 0
        async for job in _in_turns(self._jobs.after(after, limit, unfinished=unfinished)):
            members += job.request.members
            if found and members > LISTED_MEMBERS:
                break
            found.append(self._status(job, results=False))
            after = job.number
        return found, after

    def _found(self, job_id: str) -> Job:
        job = self._jobs.find(job_id)
        if job is None:
            raise UnknownError(f"there is no rollout {job_id!r:.100}")
        return job

    def _status(self, job: Job, *, results: bool) -> RolloutStatus:
        done = {result.member: result for result in self._jobs.results(job.number)}
        members = []
        for number in range(job.request.members):
            name = TrajectoryId(f"{job.group_id}.{number}")
            members.append(
                self._done(done[name], results) if name in done else self._under_way(name)
            )
        begun = any(member.stage != "queued" for member in members)
        state = "done" if len(done) == len(members) else "running" if begun else "queued"
        waits_for = self.waits_for() if state != "done" else ""
        return RolloutStatus(
            id=job.id,
            handler=job.request.handler,
            state=state,
            members=tuple(members),
            waits_for=waits_for,
        )

    def _done(self, result: Result, wanted: bool) -> MemberStatus:
        try:
            trajectory = (
                self._store.read([result.entry])[0] if wanted and result.entry is not None else None
            )
        except (
            OSError,
            CorruptJournalError,
            msgspec.MsgspecError,
        ) as error:  # a file of the store was deleted or damaged
            raise GoneError(
                f"the trajectory of {result.member} cannot be read any more: {error}"
            ) from error
        return MemberStatus(
            id=result.member,
            stage="done",
            attempt=result.attempt,
            stop_reason=result.stop_reason,
            result=trajectory,
        )

    def _under_way(self, name: TrajectoryId) -> MemberStatus:
        trajectory = self._state.trajectories.get(name)
        if trajectory is None:
            return MemberStatus(id=name, stage="queued", attempt=0)
        # What is over and not yet noted is about to be.
        return MemberStatus(
            id=name, stage=STAGES.get(trajectory.stage, "eval"), attempt=trajectory.attempt
        )

    async def wait(self, job_id: str, seconds: float) -> RolloutStatus:
        """`status` with results, once it is done or after `seconds`.

        Raises UnknownError.
        """
        job = self._jobs.find(job_id)
        if job is not None and job.left and seconds > 0:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(job.number, []).append(future)
            try:
                await asyncio.wait([future], timeout=seconds)
            finally:
                waiting = self._waiting.get(job.number, [])
                if future in waiting:
                    waiting.remove(future)
                if not waiting:
                    self._waiting.pop(job.number, None)
        return self.status(job_id, results=True)

    def cancel(self, job_id: str) -> RolloutStatus:
        """Ask for the end of all members; their results say `cancelled`.

        Raises UnknownError.
        """
        status = self.status(job_id, results=False)
        left = [member.id for member in status.members if member.stage != "done"]
        if job_id not in self._cancelling and left:  # who asks again and again fills no inbox
            self._cancelling.add(job_id)
            for name in left[:-1]:
                self._post(RolloutCancelled(trajectory_id=name))
            self._live.pump.post(
                RolloutCancelled(trajectory_id=left[-1]), lambda: self._cancelling.discard(job_id)
            )
        return status

    async def completed(
        self, after: int, *, limit: int, seconds: float, rollout: str | None = None
    ) -> list[Completion]:
        """Return members that were done after number `after`; if there are none, wait
        for one for at most `seconds`.

        With `rollout`, return only members of that rollout, and do not wait once all of
        them are done. Raises UnknownError.
        """
        job = self._found(rollout).number if rollout is not None else None
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            news, found = self._news, self._jobs.since(after, limit, job=job)
            left = deadline - asyncio.get_running_loop().time()
            if (
                found
                or left <= 0
                or self._ended
                or (rollout is not None and not self._is_under_way(rollout))
            ):
                return [
                    Completion(
                        number=result.number,
                        rollout=self._jobs.id_of(result.job) or "",
                        member=result.member,
                        stop_reason=result.stop_reason,
                    )
                    for result in found
                ]
            try:
                async with asyncio.timeout(left):
                    await news.wait()
            except TimeoutError:
                continue

    def _is_under_way(self, job_id: str) -> bool:
        job = self._jobs.find(job_id)
        return job is not None and job.left > 0

    def last_completion(self) -> int:
        """Number of the newest; 0 before the first."""
        return self._jobs.last()

    def job_of(self, member: TrajectoryId) -> str | None:
        """The id under which this trajectory was asked for."""
        return self._jobs.id_of(job_number(member))

    def handlers(self) -> list[str]:
        """What can be asked for: the task domains of the configuration."""
        return [task.name for task in self._config.tasks]

    def environments(self) -> dict[str, str]:
        """Task domain → its environment or handler."""
        return {task.name: task.env for task in self._config.tasks}

    # Engines.

    def address(self, engine_id: EngineId) -> EngineRequest | None:
        """Where a registered engine is; None for a local one."""
        return self._addresses.get(engine_id)

    def register(self, request: EngineRequest) -> EngineStatus:
        """Use this engine from now on. If its address is already registered with the
        same settings, nothing changes.

        With other settings the engine is replaced: turns under way end under the former
        settings, and new turns wait for the new ones.
        """
        if self._closed:
            raise ClosedError("the service is ending")
        for engine_id, known in list(self._addresses.items()):
            if known.address != request.address:
                continue
            if known == request and self._is_there(engine_id):
                return self._engine(engine_id)
            if self._is_there(engine_id):
                self._withdraw(engine_id, drain=True)
            else:  # the engine failed too often, and was removed
                self._forget_engine(engine_id)
        if len({*self._addresses, *filter(is_registered, self._state.engines)}) >= MOST_ENGINES:
            raise FullError(f"at most {MOST_ENGINES} engines may be registered; withdraw one first")
        engine_id = EngineId(f"x{self._next_engine}")
        self._engine_tokens.put(engine_id, request.token)
        self._jobs.add_engine(engine_id, as_json(msgspec.structs.replace(request, token="")))
        self._offer(engine_id, request)
        return self._engine(engine_id)

    def _forget_engine(self, engine_id: EngineId) -> None:
        self._jobs.remove_engine(engine_id)
        self._engine_tokens.remove(engine_id)
        self._addresses.pop(engine_id, None)
        self._troubles.pop(engine_id, None)
        self._unreachable.pop(engine_id, None)

    def _is_there(self, engine_id: EngineId) -> bool:
        return engine_id in self._state.engines or engine_id in self._offered

    def _offer(self, engine_id: EngineId, request: EngineRequest) -> None:
        self._addresses[engine_id] = request
        # no number comes twice in a life
        self._next_engine = max(self._next_engine, int(engine_id.removeprefix("x")) + 1)
        self._offered.add(engine_id)
        event = EngineRegistered(engine=EngineSlot(id=engine_id))
        self._live.pump.post(event, functools.partial(self._offered.discard, engine_id))

    def unreachable(self, engine_id: EngineId, reason: str, tries: int, next_s: float) -> None:
        """Note a failed try to reach a registered engine that has not answered yet.

        Warn if the reason is new.
        """
        if engine_id not in self._addresses:
            return
        if self._unreachable.get(engine_id) != reason:
            self._unreachable[engine_id] = reason
            address = self._addresses[engine_id].address
            self.warned(
                Warn(
                    component=engine_id,
                    message=f"unreachable at {address}: {reason}; it will be tried again",
                )
            )
        times = "once" if tries == 1 else f"{tries} times"
        self._troubles[engine_id] = f"unreachable: {reason}, tried {times}, next in {next_s:g} s"

    def noted(self, engine_id: EngineId, text: str) -> None:
        """Warn of a problem of a registered engine that serves nevertheless, but not
        twice of the same one.
        """
        warning = Warn(component=engine_id, message=text)
        if engine_id in self._addresses and warning not in self.warnings:
            self.warned(warning)

    def waits_for(self) -> str:
        """Return why rollouts wait; "" if an engine serves."""
        if self._serving():
            return ""
        known = [*dict.fromkeys((*self._state.engines, *self._addresses))]
        told = [
            f"{engine_id}: {self._troubles.get(engine_id, 'starting')}"
            for engine_id in known[:FEW_ENGINES]
        ]
        return "no engine serves" + (f" ({'; '.join(told)})" if told else ": none is registered")

    def withdraw(self, engine_id: EngineId, *, drain: bool, force: bool = False) -> None:
        """Withdraw the engine: when its turns are done (`drain`), or at once.

        Raises UnknownError, and ConflictError for the last engine that serves, unless
        `force` is given.
        """
        if engine_id not in self._state.engines and engine_id not in self._addresses:
            raise UnknownError(f"there is no engine {engine_id!r:.100}")
        if not force and [engine.id for engine in self._serving()] == [engine_id]:
            raise ConflictError(
                f"the engine must not be the last one that serves, got {engine_id}: register "
                "another one and wait until it "
                "serves, or give force=true, and rollouts wait for an engine"
            )
        self._withdraw(engine_id, drain=drain)

    def _withdraw(self, engine_id: EngineId, *, drain: bool) -> None:
        self._forget_engine(engine_id)
        self._withdrawing.add(engine_id)
        event = EngineWithdrawn(engine_id=engine_id, drain=drain)
        self._live.pump.post(event, functools.partial(self._withdrawing.discard, engine_id))

    def engines(self) -> list[EngineStatus]:
        """List all engines, local ones first.

        One that failed too often is `removed` until it is registered again.
        """
        return [
            self._engine(engine_id)
            for engine_id in dict.fromkeys((*self._state.engines, *self._addresses))
        ]

    def _engine(self, engine_id: EngineId) -> EngineStatus:
        engine, request = self._state.engines.get(engine_id), self._addresses.get(engine_id)
        return EngineStatus(
            id=engine_id,
            address=request.address if request is not None else "",
            status=engine.status.value
            if engine is not None
            else "starting"
            if self._is_there(engine_id)
            else REMOVED,
            version=engine.version if engine is not None else -1,
            slots=engine.max_slots if engine is not None else 0,
            running=len(engine.active) if engine is not None else 0,
            draining=engine is not None and engine.draining,
            restarts=engine.restarts if engine is not None else 0,
            reason=""
            if engine is not None and _serves(engine)
            else self._troubles.get(engine_id, ""),
        )

    # Its state and end.

    @property
    def closed(self) -> bool:
        """It takes nothing more."""
        return self._closed

    @property
    def health(self) -> str:
        """The service's status: `ok`, `no engine` or `closing`."""
        return "closing" if self._closed else "ok" if self._serving() else "no engine"

    def _serving(self) -> list[CoreEngine]:
        """Engines that take turns now and are not being withdrawn."""
        engines = self._state.engines.values()
        return [
            engine for engine in engines if _serves(engine) and engine.id not in self._withdrawing
        ]

    def counts(self) -> Mapping[str, int]:
        """Rollouts by where they are, and turns."""
        state = self._state
        return {
            "queued": len(state.init_queue),
            "init": len(state.in_init),
            "run": len(state.in_run),
            "eval": len(state.in_eval) + len(state.eval_queue),
            "closing": len(state.closing),
            "engines": len(self._serving()),
            "turns_waiting": len(state.turn_queue),
            "turns_running": sum(len(engine.active) for engine in state.engines.values()),
            "submitted": state.counters.submitted,
            "output_tokens": state.counters.output_tokens,
        }

    def delivered_by_reason(self) -> Mapping[str, int]:
        """Rollouts that were delivered, by stop reason."""
        return dict(self._state.counters.delivered)

    @property
    def ended(self) -> bool:
        """Nothing more comes of it."""
        return self._ended

    def close(self, *, drain: bool) -> None:
        """Take nothing more, and end."""
        self._closed = True
        self._live.stop(drain=drain)

    def end(self) -> None:
        """Its world is over: nobody waits any longer."""
        self._ended = True
        for future in [
            future for waiting in self._waiting.values() for future in waiting if not future.done()
        ]:
            future.set_result(None)
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


async def _in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """All of them; others have their turn after each few, so that thousands at once do
    not hold up everybody.
    """
    for number, item in enumerate(items):
        if number % FEW == 0:
            await asyncio.sleep(0)
        yield item


def _serves(engine: CoreEngine) -> bool:
    return engine.status is CoreEngineStatus.SERVING and not engine.departing


def is_registered(engine_id: EngineId) -> bool:
    """True for an engine that came by `register`; False for one of our own processes."""
    return engine_id.startswith("x")
