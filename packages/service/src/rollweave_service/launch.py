"""Launch a service from a configuration. A directory that holds a service continues
where that service ended or was killed.

Invariants: one controller at a time uses the directory; however the service ends, no
process, socket or temporary file of it is left; the address is published only once the
service answers.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from aiohttp import web

from rollweave.core.mechanisms.membership.members import first_engines
from rollweave.core.state import State
from rollweave.engine.clients.base import Generates
from rollweave.envs.tasks import TaskSource
from rollweave.envs.threads import describe_error
from rollweave.io.disk import replace_file
from rollweave.io.http.guard import Guard, kept_token
from rollweave.io.http.listening import ADDRESS, Access, listening
from rollweave.io.hub import folder
from rollweave.record.rundir import RunDir
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.runtime.hosts.hosts import hosts_here
from rollweave.runtime.life import begun, machine_of, recorded, wired
from rollweave.runtime.processes import Processes
from rollweave.runtime.signals import on_ending_signals, run_to_the_end
from rollweave.schema.address import Hosts
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, EngineError, RollweaveError
from rollweave.schema.events import EngineSlot
from rollweave.schema.hosts import Programs
from rollweave.train.lengths import check_installed
from rollweave_service import http
from rollweave_service.adapters.prorl import ProRL
from rollweave_service.engines import (
    PRIVATE_NETWORKS,
    BackendFactory,
    EngineTokens,
    is_registered,
)
from rollweave_service.jobs import JobStore, job_of_group
from rollweave_service.service import Service
from rollweave_service.world import ServiceWorld

ON_LOOPBACK = Access()
"""The default: loopback, with a token that is generated and kept."""

TRACE_LIMIT = 100_000
"""Maximum number of events in one part of a service's trace: 12 MB, and another 12 MB
for the previous part.
"""

SHUTDOWN_S = 5.0
"""Maximum seconds for HTTP requests that are under way when the service ends."""


class ServiceObserver(Protocol):
    """The caller's view of a service: it is notified of the stages of its life."""

    def on_ready(self, address: str, token: str | None, stop: Callable[[bool], None]) -> None:
        """Handle that the service answers at `address` to clients with `token`; None
        admits every client that can connect.

        `stop`, which any thread may call, ends the service: after the accepted rollouts
        are done (True), or at once (False).
        """

    def on_warning(self, command: Warn) -> None:
        """Handle a problem of a component."""

    def on_stopping(self, drain: bool) -> None:
        """Handle that the service accepts no more rollouts, and ends."""


def serve(
    config: RunConfig,
    *,
    observer: ServiceObserver,
    make_backend: BackendFactory,
    inproc: bool = False,
    programs: Programs | None = None,
    on_service: Callable[[Service], None] = lambda _: None,
    access: Access = ON_LOOPBACK,
    unsandboxed: bool = False,
    registered: bool = False,
    engine_hosts: Hosts = PRIVATE_NETWORKS,
) -> None:
    """Serve until SIGINT or SIGTERM: after the first, accepted rollouts are completed;
    the second cancels them.

    Without `unsandboxed`, a sandbox that isolates nothing is refused, because the
    commands of clients would run as this user. With `registered`, the service starts no
    engines, and has only engines that clients register, on `engine_hosts`.
    `on_service` gets the service itself, on its event loop, for use without HTTP.
    Raises ConfigError, also if the port is taken, and DiskError. Any other failure that
    ends the service becomes a RollweaveError.
    """
    if config.model.path is None:
        raise ConfigError(
            "model.path must be a checkpoint to serve, got [model.scratch]; to serve a trained "
            "run, give its directory"
        )
    if config.sandbox.backend == "plain" and not unsandboxed:
        raise ConfigError(
            "sandbox.backend must isolate the commands of a service's clients, got 'plain', under "
            "which they run as this user; `rollweave serve --unsandboxed` allows that"
        )
    token_given = access.check()
    for number, reward in enumerate(config.rewards):
        if reward.deployed:
            raise ConfigError(
                f"rewards.{number}.run must be left out for a function of a service, got "
                f"{reward.run} (give the URL of a deployment of your own)"
            )
        if reward.pairwise:
            raise ConfigError(
                f"rewards.{number}.judge.pairwise compares members of training groups, which a "
                f"service does not have; leave out reward {reward.name!r}"
            )
    for name, role in config.roles.items():
        raise ConfigError(
            f"roles.{name} must be left out for a service, got {role.cls or 'a judge'}"
        )
    check_installed(config)
    # errors in these are reported before the directory is created
    source = TaskSource(config)
    codec = ChatCodec.from_directory(folder(config.model.path), config.model.template_arguments)
    directory = RunDir((Path(config.run.dir) / config.run.name).absolute())
    with RunDir.claim(config, resume=directory.config.exists()) as run:
        launch = _Launch(
            config=config,
            directory=run,
            source=source,
            codec=codec,
            token=None if access.no_token else token_given or kept_token(run.token),
            access=access,
            inproc=inproc,
            programs=programs or Programs(),
            make_backend=make_backend,
            registered=registered,
            engine_hosts=engine_hosts,
        )
        try:
            run_to_the_end(launch.run(observer, on_service))
        except (RollweaveError, OSError, KeyboardInterrupt):
            raise
        except BaseException as error:
            # also SystemExit, whose exit code could be that of a service that was
            # stopped
            raise RollweaveError(
                f"a failure that Rollweave did not foresee: {describe_error('the service', error)}"
            ) from error


def _check_jobs_match_journal(run: RunDir, state: State, jobs: JobStore) -> None:
    """Raise ConfigError if the job database is older than the journal: its names would
    be used twice.
    """
    known = max(
        [bool(state.counters.submitted), *(job_of_group(group_id) for group_id in state.groups)]
    )
    if jobs.last_job_number() < known:
        raise ConfigError(
            f"{run.path} must hold the jobs.sqlite that belongs to its journal.bin, got one with "
            f"{jobs.last_job_number()} requests of {known} or more; restore that file, or delete "
            "the directory to start afresh"
        )


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """A service that is being launched; the fields are those of `serve`."""

    config: RunConfig
    directory: RunDir
    source: TaskSource
    codec: ChatCodec
    token: str | None = field(repr=False)
    access: Access
    inproc: bool
    programs: Programs
    make_backend: BackendFactory
    registered: bool
    engine_hosts: Hosts

    async def run(self, observer: ServiceObserver, on_service: Callable[[Service], None]) -> None:
        config, run = self.config, self.directory
        with (
            recorded(config, run, serving=True) as records,
            begun(records, limit=TRACE_LIMIT, renew=True) as life,
            contextlib.closing(JobStore(run.path / "jobs.sqlite")) as jobs,
        ):
            for doubt in life.doubts():
                observer.on_warning(doubt)
            _check_jobs_match_journal(run, life.beginning.core.state, jobs)
            service = Service(
                config,
                jobs=jobs,
                tokens=EngineTokens(run.engine_tokens),
                source=self.source,
                store=life.store,
            )
            service.on_warning = observer.on_warning
            on_service(service)
            processes = Processes(
                config,
                run,
                hosts_here(0, self.programs),
                words=(),
                inproc=self.inproc,
                on_ready=lambda: None,
                version=0,
            )
            with wired(
                life,
                self.source,
                processes,
                show=observer.on_warning,
                warn=service.warned,
                make_engine=functools.partial(self._engine, service, processes),
            ) as wiring:
                await self._serve(ServiceWorld(wiring, sink=service), service, observer)

    def _engine(
        self, service: Service, processes: Processes, slot: EngineSlot, epoch: int
    ) -> Generates:
        """Start an engine, or connect to a registered one."""
        if not is_registered(slot.id):
            return processes.engine(slot, epoch)
        request = service.engines.request_of(slot.id)
        if request is None:
            raise EngineError("it was withdrawn")
        unreachable = functools.partial(service.engines.note_unreachable, slot.id)
        try:
            return self.make_backend(request, f"engine {slot.id}.{epoch}", unreachable)
        except (RollweaveError, ValueError) as error:
            # a wrong registration must not end the service
            raise EngineError(str(error)) from error

    async def _serve(
        self, world: ServiceWorld, service: Service, observer: ServiceObserver
    ) -> None:
        engines = () if self.registered else first_engines(self.config)
        machine = machine_of(self.config, relays=0, inproc=self.inproc)
        first = world.life.first(engines, machine, serving=True)
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        service.world.world = world
        running = asyncio.create_task(world.run(first))

        def stop(drain: bool) -> None:
            observer.on_stopping(drain)
            service.world.stop(drain=drain)

        def stop_from_any_thread(drain: bool) -> None:
            loop.call_soon_threadsafe(stop, drain)

        await asyncio.sleep(0)  # the world posts the first event
        service.restore()
        prorl = ProRL(service, codec=self.codec, hosts=self.engine_hosts)
        app = http.make_app(service, self.engine_hosts, prorl.routes())
        guard = self.access.guard(self.token)

        def on_listening(address: str) -> None:
            replace_file(self.directory.address, address.encode())
            observer.on_ready(address, self.token, stop_from_any_thread)

        answering = asyncio.create_task(
            _answer(app, self.access, guard, stopped=stopped, on_listening=on_listening)
        )
        try:
            # the first signal drains, the second cancels
            with on_ending_signals(lambda: stop(not service.world.closed)):
                await asyncio.wait([running, answering], return_when=asyncio.FIRST_COMPLETED)
        finally:
            service.rollouts.end()
            stopped.set()
            self.directory.address.unlink(missing_ok=True)
            cancelled = running.cancel()
            await asyncio.gather(running, answering, return_exceptions=True)
        if not (cancelled and running.cancelled()):
            running.result()  # raises the error that ended the task
        answering.result()


async def _answer(
    app: web.Application,
    access: Access,
    guard: Guard,
    *,
    stopped: asyncio.Event,
    on_listening: Callable[[str], None],
) -> None:
    """Answer HTTP requests until `stopped`; `on_listening` gets the address."""
    async with listening(
        app, access.host, access.port, guard=guard, shutdown_s=SHUTDOWN_S, names=ADDRESS
    ) as address:
        on_listening(address)
        await stopped.wait()
