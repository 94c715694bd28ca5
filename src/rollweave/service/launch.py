"""`serve`: from a configuration to a service that listens. The same directory goes on where it ended or was killed.

Invariants: the directory is held by one controller, and is a service's; whatever ends the service, no process, socket or
temporary file of it is left; the address is said once it answers.
"""

import asyncio
import contextlib
import functools
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rollweave.backends.base import EngineBackend
from rollweave.codec.chat import ChatCodec
from rollweave.core.core import Core
from rollweave.core.seats import first_seats
from rollweave.core.state import State
from rollweave.envs.tasks import TaskSource
from rollweave.live.clock import RunClock
from rollweave.live.episodes import Episodes
from rollweave.live.launch import Processes, Programs, model_dir
from rollweave.live.recover import Beginning, recover
from rollweave.live.serving import ServiceWorld
from rollweave.live.signals import on_ending_signals
from rollweave.record.journal import RunJournal
from rollweave.record.rundir import RunDir
from rollweave.record.trace import SERVICE_LIMIT, Trace
from rollweave.rollout.store import TrajectoryStore
from rollweave.schema.commands import Warn
from rollweave.schema.config import RunConfig
from rollweave.schema.errors import ConfigError, DiskError, EngineError, RollweaveError
from rollweave.schema.events import EngineSeat, RunStarted, WorldLost
from rollweave.schema.service import EngineRequest
from rollweave.service import http
from rollweave.service.jobs import Jobs, group_number
from rollweave.service.prorl import ProRL
from rollweave.service.service import Service, is_registered

COMPACT_S = 5.0
"""Between two looks whether the journal should begin anew: a busy service writes a megabyte a second."""

FILES = 1 << 16
"""Open files that we ask the system for, if it allows so many: programs that we start may close each number that may be one."""

Connect = Callable[[EngineRequest, str], EngineBackend]
"""Make a registered engine's backend, of this name."""


class Host(Protocol):
    """Who started the service."""

    def ready(self, address: str, stop: Callable[[bool], None]) -> None:
        """It answers at `address`. `stop`, from whatever thread, ends it: when what it accepted is done (True), or at once."""

    def warned(self, command: Warn) -> None:
        """A component ails."""

    def stopping(self, drain: bool) -> None:
        """It takes nothing more."""


def serve(
    config: RunConfig,
    *,
    host: Host,
    connect: Connect,
    inproc: bool = False,
    programs: Programs | None = None,
    observe: Callable[[Service], None] = lambda _: None,
) -> None:
    """Serve until SIGINT or SIGTERM: the first ends it when what was accepted is done, the second at once.

    `observe` gets the service itself, on its loop, for whoever asks without HTTP. Raises ConfigError, DiskError, OSError (the
    port is taken).
    """
    if config.model.path is None:
        raise ConfigError(
            "model.path must be a checkpoint to serve, got [model.scratch]; a trained run is served by its directory"
        )
    token = _token(config)
    source, codec = TaskSource(config), ChatCodec.from_directory(Path(config.model.path))  # or nothing is begun
    directory = RunDir((Path(config.run.dir) / config.run.name).absolute())
    with RunDir.claim(config, resume=directory.config.exists()) as run:
        start = _Start(config, run, source, codec, token=token, inproc=inproc, programs=programs or Programs(), connect=connect)
        asyncio.run(start.run(host, observe))


def _token(config: RunConfig) -> str | None:
    name = config.serve.token_env
    if name is not None and not os.environ.get(name):
        raise ConfigError(f"serve.token_env must name a variable of the environment that is not empty, got {name!r}")
    loopback = config.serve.host in ("127.0.0.1", "::1", "localhost")
    if name is None and not loopback:
        raise ConfigError(f"serve.token_env must be given where serve.host is not this host alone, got {config.serve.host!r}")
    token = os.environ[name] if name is not None else None
    if token is not None and not (token.isprintable() and token.strip() == token):
        raise ConfigError(f"serve.token_env must name a variable without a line's end or outer spaces, got {name!r}")
    return token


def _connections() -> int:
    """How many there may be: half of the files that may be open, of which the rest is for engines, sandboxes and our own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # not on every system as far as it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return (FILES if soft == resource.RLIM_INFINITY else soft) // 2


def _same_life(run: RunDir, state: State, jobs: Jobs) -> None:
    """Raises ConfigError where the requests are not those of the journal: names would be used twice."""
    known = max([bool(state.counters.submitted), *(group_number(group_id) for group_id in state.groups)])
    if jobs.newest() < known:
        raise ConfigError(
            f"{run.path} must hold the jobs.sqlite that belongs to its journal.bin, found one with {jobs.newest()} requests of "
            f"{known} or more; bring it back, or delete the directory to begin anew"
        )


class _Start:
    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        source: TaskSource,
        codec: ChatCodec,
        *,
        token: str | None,
        inproc: bool,
        programs: Programs,
        connect: Connect,
    ) -> None:
        self._config, self._run, self._source, self._codec, self._token = config, run, source, codec, token
        self._inproc, self._programs, self._connect = inproc, programs, connect

    async def run(self, host: Host, observe: Callable[[Service], None]) -> None:
        config, run = self._config, self._run
        with contextlib.ExitStack() as stack:
            if not run.config.exists():
                run.write_config(config)
            store = stack.enter_context(TrajectoryStore(run.trajectories))
            begun = self._recovered(store)
            clock = RunClock(begun.at)
            journal = stack.enter_context(RunJournal(run.journal))
            if begun.resumed:
                journal.rotate(begun.core.snapshot())
            run.write_config(config)
            jobs = Jobs(run.path / "jobs.sqlite")
            stack.callback(jobs.close)
            _same_life(run, begun.core.state, jobs)
            trace = Trace(run.trace, limit=SERVICE_LIMIT, renew=True)
            stack.callback(trace.close)
            service = Service(config, jobs=jobs, source=self._source, store=store)
            service.on_warning = host.warned
            observe(service)
            episodes = Episodes(config, model_dir(config, run), self._source, clock)
            world = self._world(begun.core, clock, journal, store, trace, service, episodes)
            try:
                await self._live(world, service, begun, host)
            finally:
                await episodes.close()

    def _recovered(self, store: TrajectoryStore) -> Beginning:
        begun = recover(self._config, self._run, store)
        if begun.resumed and not begun.core.state.serving:
            raise ConfigError(f"run.name: {self._run.path} holds a training run; choose another name for the service")
        return begun

    def _world(
        self,
        core: Core,
        clock: RunClock,
        journal: RunJournal,
        store: TrajectoryStore,
        trace: Trace,
        service: Service,
        episodes: Episodes,
    ) -> ServiceWorld:
        config = self._config
        processes = Processes(
            config,
            self._run,
            words=(),
            inproc=self._inproc,
            programs=self._programs,
            on_ready=lambda: None,
            version=0,
        )

        def make_engine(seat: EngineSeat, epoch: int) -> EngineBackend:
            if not is_registered(seat.id):
                return processes.engine(seat, epoch)
            request = service.address(seat.id)
            if request is None:
                raise EngineError("it was withdrawn")
            try:
                return self._connect(request, f"engine {seat.id}.{epoch}")
            except (RollweaveError, ValueError) as error:  # what somebody said of it is wrong; the service goes on
                raise EngineError(str(error)) from error

        return ServiceWorld(
            config,
            core=core,
            clock=clock,
            journal=journal,
            store=store,
            trace=trace,
            make_engine=make_engine,
            make_episode=episodes.make,
            customers=service,
        )

    async def _live(self, world: ServiceWorld, service: Service, begun: Beginning, host: Host) -> None:
        config = self._config.serve
        seats = first_seats(self._config) if config.engines == "local" else ()
        first = WorldLost(engines=seats, missing=begun.missing) if begun.resumed else RunStarted(engines=seats, serving=True)
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        service.attach(world)
        living = asyncio.create_task(world.run(first))

        def stop(drain: bool) -> None:
            host.stopping(drain)
            service.close(drain=drain)

        def stop_from_anywhere(drain: bool) -> None:
            loop.call_soon_threadsafe(stop, drain)

        await asyncio.sleep(0)  # the first event is the world's
        service.go_on()
        app = http.build(service, token=self._token)
        app.add_routes(ProRL(service, codec=self._codec).table())
        ready = functools.partial(host.ready, stop=stop_from_anywhere)
        listening = asyncio.create_task(
            http.serve(app, config.host, config.port, most=_connections(), stopped=stopped, ready=ready)
        )
        compacting = asyncio.create_task(_compact(world, service.warned))
        try:
            with on_ending_signals(lambda: stop(not service.closed)):  # the first drains, the second cancels
                await asyncio.wait([living, listening], return_when=asyncio.FIRST_COMPLETED)
        finally:
            service.end()
            stopped.set()
            for task in (compacting, *([] if living.done() else [living])):
                task.cancel()
            found = await asyncio.gather(living, listening, compacting, return_exceptions=True)
        for error in found:
            if isinstance(error, Exception):
                raise error


async def _compact(world: ServiceWorld, warned: Callable[[Warn], None]) -> None:
    while True:
        await asyncio.sleep(COMPACT_S)
        try:
            world.compact()
        except DiskError as error:  # the journal goes on as it is
            warned(Warn(component="journal", message=str(error)))
