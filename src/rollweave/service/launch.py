"""`serve`: from a configuration to a service that listens. The same directory goes on
where it ended or was killed.

Invariants: the directory is held by one controller, and is a service's; whatever ends
the service, no process, socket or temporary file of it is left; the address is said
once it answers.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from aiohttp import web

from rollweave.core.core import Core
from rollweave.core.membership import first_engines
from rollweave.core.state import State
from rollweave.engine.clients.base import EngineBackend
from rollweave.engine.clients.transport import Failed
from rollweave.envs.foreign import what_happened
from rollweave.envs.tasks import TaskSource
from rollweave.io.disk import replace_file
from rollweave.io.http.guard import Guard, given_token, kept_token
from rollweave.io.http.listening import cannot_listen, check_address
from rollweave.record.identity import write_identity
from rollweave.record.journal import RunJournal
from rollweave.record.rundir import RunDir
from rollweave.record.store import TrajectoryStore
from rollweave.record.trace import SERVICE_LIMIT, Trace
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.runtime.episodes import Episodes
from rollweave.runtime.launch import Processes, Programs, torn
from rollweave.runtime.loopwatch import watched
from rollweave.runtime.pump import RunClock
from rollweave.runtime.recover import Beginning, model_dir, recover, settle
from rollweave.runtime.serving import ServiceWorld
from rollweave.runtime.signals import on_ending_signals, run_to_the_end
from rollweave.runtime.wiring import Wiring
from rollweave.schema.address import Hosts
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import ServeConfig
from rollweave.schema.errors import ConfigError, DiskError, EngineError, RollweaveError
from rollweave.schema.events import EngineSlot
from rollweave.schema.service import EngineRequest
from rollweave.service import http
from rollweave.service.jobs import Jobs, group_number
from rollweave.service.prorl import ProRL
from rollweave.service.reach import EngineTokens
from rollweave.service.service import Service, is_registered

NAMES = "serve.host and serve.port"

COMPACT_S = 5.0
"""Between two looks whether the journal should begin anew: a busy service writes a
megabyte a second.
"""

Connect = Callable[[EngineRequest, str, Failed, Callable[[str], None]], EngineBackend]
"""Makes the backend of a registered engine, with this name and callbacks for failed
tries to reach it and for warnings.
"""


class Host(Protocol):
    """Who started the service."""

    def ready(self, address: str, token: str | None, stop: Callable[[bool], None]) -> None:
        """Called when the service answers at `address`, to clients that have the
        `token`; None: to all that can connect.

        `stop`, which any thread may call, ends it: once everything that was accepted is
        done (True), or at once (False).
        """

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
    no_token: bool = False,
    unsandboxed: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM: the first ends it when what was accepted is done,
    the second at once.

    `no_token` admits every program on this host. Without `unsandboxed`, a sandbox that
    isolates nothing is refused, because what clients ask for would run as this user.
    `observe` gets the service itself, on its loop, for use without HTTP. Raises
    ConfigError, also if the port is taken, and DiskError. Whatever else ends the
    service becomes a RollweaveError.
    """
    if config.model.path is None:
        raise ConfigError(
            "model.path must be a checkpoint to serve, got [model.scratch]; a trained run is "
            "served by its directory"
        )
    if config.sandbox.backend == "plain" and not unsandboxed:
        raise ConfigError(
            "sandbox.backend must isolate what clients of a service ask for, got 'plain', under "
            "which it runs as this user; "
            "`rollweave serve --unsandboxed` allows that"
        )
    given = given_token(
        config.serve.token_env, no_token=no_token, host=config.serve.host, named="serve.token_env"
    )
    check_address(config.serve.host, config.serve.port, names=NAMES)
    # or nothing is begun
    source, codec = TaskSource(config), ChatCodec.from_directory(Path(config.model.path))
    directory = RunDir((Path(config.run.dir) / config.run.name).absolute())
    with RunDir.claim(config, resume=directory.config.exists()) as run:
        token = None if no_token else given or kept_token(run.token)
        start = _Start(
            config,
            run,
            source,
            codec,
            token=token,
            inproc=inproc,
            programs=programs or Programs(),
            connect=connect,
        )
        try:
            run_to_the_end(start.run(host, observe))
        except (RollweaveError, OSError, KeyboardInterrupt):
            raise
        except (
            BaseException
        ) as error:  # SystemExit, too, whose exit code could be that of a service that was stopped
            raise RollweaveError(
                f"a failure that Rollweave did not foresee: {what_happened('the service', error)}"
            ) from error


def _same_life(run: RunDir, state: State, jobs: Jobs) -> None:
    """Raises ConfigError where the requests are not those of the journal: names would
    be used twice.
    """
    known = max(
        [bool(state.counters.submitted), *(group_number(group_id) for group_id in state.groups)]
    )
    if jobs.newest() < known:
        raise ConfigError(
            f"{run.path} must hold the jobs.sqlite that belongs to its journal.bin, found one "
            f"with {jobs.newest()} requests of "
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
        self._config, self._run, self._source, self._codec, self._token = (
            config,
            run,
            source,
            codec,
            token,
        )
        self._inproc, self._programs, self._connect = inproc, programs, connect

    async def run(self, host: Host, observe: Callable[[Service], None]) -> None:
        config, run = self._config, self._run
        with contextlib.ExitStack() as stack:
            if not run.config.exists():
                run.write_config(config)
            store = stack.enter_context(TrajectoryStore(run.trajectories))
            begun = recover(config, run, store, serving=True)
            if not run.identity.exists():
                write_identity(run.identity, begun.identity)
            clock = RunClock(begun.at)
            journal = stack.enter_context(RunJournal(run.journal))
            if begun.resumed:
                journal.rotate(begun.core.snapshot())
            begun = settle(config, run, begun)
            for doubt in begun.doubts:
                host.warned(doubt)
            jobs = Jobs(run.path / "jobs.sqlite")
            stack.callback(jobs.close)
            _same_life(run, begun.core.state, jobs)
            trace = Trace(run.trace, limit=SERVICE_LIMIT, renew=True)
            stack.callback(trace.close)
            service = Service(
                config,
                jobs=jobs,
                tokens=EngineTokens(run.engine_tokens),
                source=self._source,
                store=store,
            )
            service.on_warning = host.warned
            for line in torn(journal, store):
                host.warned(line)
            self._source.threads.on_left = lambda text: service.warned(
                Warn(component="environment", message=text)
            )
            stack.enter_context(
                watched(show=host.warned, warn=service.warned, trace=trace, clock=clock.now)
            )
            observe(service)
            episodes = Episodes(config, model_dir(config, run), self._source, clock)
            world = self._world(begun.core, clock, journal, store, trace, service, episodes)
            try:
                await self._live(world, service, begun, host)
            finally:
                await episodes.close()

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

        def make_engine(seat: EngineSlot, epoch: int) -> EngineBackend:
            if not is_registered(seat.id):
                return processes.engine(seat, epoch)
            request = service.address(seat.id)
            if request is None:
                raise EngineError("it was withdrawn")
            try:
                unreachable, noted = (
                    functools.partial(tell, seat.id)
                    for tell in (service.unreachable, service.noted)
                )
                return self._connect(request, f"engine {seat.id}.{epoch}", unreachable, noted)
            except (
                RollweaveError,
                ValueError,
            ) as error:  # what somebody said of it is wrong; the service goes on
                raise EngineError(str(error)) from error

        wiring = Wiring(
            config=config,
            core=core,
            clock=clock,
            journal=journal,
            store=store,
            trace=trace,
            make_engine=make_engine,
            make_episode=episodes.make,
        )
        return ServiceWorld(wiring, sink=service)

    async def _live(
        self, world: ServiceWorld, service: Service, begun: Beginning, host: Host
    ) -> None:
        config = self._config.serve
        seats = first_engines(self._config) if config.engines == "local" else ()
        first = begun.first(seats, serving=True)
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
        hosts = Hosts.parse(config.engine_hosts, field="serve.engine_hosts")
        app = http.build(service, hosts)
        guard = Guard(token=self._token, hosts=config.hosts)
        app.add_routes(ProRL(service, codec=self._codec, hosts=hosts).table())

        def ready(address: str) -> None:
            replace_file(self._run.address, address.encode())
            host.ready(address, self._token, stop_from_anywhere)

        listening = asyncio.create_task(_listen(app, config, guard, stopped=stopped, ready=ready))
        compacting = asyncio.create_task(_compact(world, service.warned))
        try:
            # the first drains, the second cancels
            with on_ending_signals(lambda: stop(not service.closed)):
                await asyncio.wait([living, listening], return_when=asyncio.FIRST_COMPLETED)
        finally:
            service.end()
            stopped.set()
            self._run.address.unlink(missing_ok=True)
            for task in (ended := [task for task in (compacting, living) if not task.done()]):
                task.cancel()
            await asyncio.gather(living, listening, compacting, return_exceptions=True)
        for task in (living, listening, compacting):
            if not (task.cancelled() and task in ended):
                task.result()  # or what it raised


async def _listen(
    app: web.Application,
    config: ServeConfig,
    guard: Guard,
    *,
    stopped: asyncio.Event,
    ready: Callable[[str], None],
) -> None:
    try:
        await http.serve(app, config.host, config.port, guard=guard, stopped=stopped, ready=ready)
    except OSError as error:  # another program has taken the port meanwhile
        raise cannot_listen(config.host, config.port, error, names=NAMES) from error


async def _compact(world: ServiceWorld, warned: Callable[[Warn], None]) -> None:
    while True:
        await asyncio.sleep(COMPACT_S)
        try:
            world.compact()
        except DiskError as error:  # the journal goes on as it is
            warned(Warn(component="journal", message=str(error)))
