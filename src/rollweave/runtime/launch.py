"""Run a configuration to its end: `train` prepares the directory, gathers the hosts and
runs the world.

Invariants: one controller has locked the run's directory; however the run ends, none of
its processes is left; a run that ended reports why, and accounts for every trajectory
that it started.
"""

import asyncio
import contextlib
import functools
from collections.abc import Iterator, Mapping

import msgspec

from rollweave.core.bindings import bind_all, bind_workers, crowded, groups_on_gpus, one_machine
from rollweave.core.continuation import continuable
from rollweave.core.core import Core
from rollweave.core.membership import engines_to_start, first_engines
from rollweave.core.policy.gaps import max_gap
from rollweave.core.policy.pools import empty_pools, unserved
from rollweave.envs.rules import named
from rollweave.envs.tasks import TaskSource
from rollweave.io.extras import how_to_install
from rollweave.record.identity import Identity, model_digests, write_identity
from rollweave.record.journal import RunJournal
from rollweave.record.rundir import RunDir
from rollweave.record.store import TrajectoryStore
from rollweave.record.summary import Summary, account_line, outcome_line, summarize, write_summary
from rollweave.record.trace import Trace
from rollweave.record.turn_log import TurnLog
from rollweave.runtime.checkpoints import Checkpoints
from rollweave.runtime.episodes import Episodes
from rollweave.runtime.hosts import user_files
from rollweave.runtime.hosts.cluster import GatheredHosts
from rollweave.runtime.hosts.hosts import Hosts
from rollweave.runtime.hosts.permissions import programs_of
from rollweave.runtime.hosts.resources import gpus_for
from rollweave.runtime.hosts.serverless import check_platform, deployed
from rollweave.runtime.links.relay import in_process as relay_in_process
from rollweave.runtime.loopwatch import watched
from rollweave.runtime.metrics import Metrics, Progress, Silent
from rollweave.runtime.preflight.checks import FORCED, forced, must_pass
from rollweave.runtime.preflight.environments import Declared
from rollweave.runtime.preflight.examiner import declared_by
from rollweave.runtime.preflight.model import check_joined
from rollweave.runtime.processes import BACKSTOP, Processes
from rollweave.runtime.pump import RunClock
from rollweave.runtime.recover import (
    Beginning,
    lost,
    model_dir,
    recall,
    recover,
    settle,
    unrecorded,
)
from rollweave.runtime.signals import on_ending_signals, run_to_the_end
from rollweave.runtime.sinks import open_sinks
from rollweave.runtime.supervisors.relays import missing_extra
from rollweave.runtime.tasks import Tasks
from rollweave.runtime.wiring import Wiring
from rollweave.runtime.world import World
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, DiskError, HostError
from rollweave.schema.events import RunStarted, WorldLost
from rollweave.schema.hosts import HostSlot, Programs, Resources
from rollweave.train.lengths import check_installed


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    force: bool = False,
    inproc: bool = False,
    progress: Progress | None = None,
    programs: Programs | None = None,
    declared: Declared | None = None,
) -> Summary:
    """Run `config` to its end, from the beginning or from the last checkpoint
    (`resume`), with engines and trainer as processes or as threads (`inproc`).

    Relays and rollout workers are processes in any case. `declared` is what the tasks
    declare, if it is known (`dryrun.plan`). With `force`, hosts of a cluster that are
    estimated to lack memory are used, with a warning.

    The first SIGINT or SIGTERM asks for an orderly end; a second one ends the run at
    once, and raises KeyboardInterrupt. Raises `ConfigError` if the user must change
    something, and `DiskError` if the run's files cannot be written: written files stay
    valid, and `resume` continues from them. Other failures of the run itself are in the
    summary's `error`.
    """
    if (extra := missing_extra(config.weights)) is not None:
        raise ConfigError(
            f"weights.transport {extra} must be installed ({how_to_install(extra)}), got none"
        )
    check_installed(config)
    check_platform(config)
    if inproc and config.cluster is not None:
        raise ConfigError("--inproc must be left out with [cluster], whose hosts run processes")
    apart = config.workers.count > 0
    with contextlib.chdir("."):  # the user's modules may change the directory
        source = TaskSource(config, imported=not apart)
        if declared is None:
            declared = declared_by(config) if apart else Declared(words=source.words())
    with RunDir.claim(config, resume=resume) as run:
        start = _Start(
            config,
            run,
            source,
            declared=declared,
            force=force,
            inproc=inproc,
            progress=progress or Silent(),
            programs=programs or Programs(),
        )
        return run_to_the_end(start.run())


class _Start:
    """One life of a run, from its directory to its summary."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        source: TaskSource,
        *,
        declared: Declared,
        force: bool,
        inproc: bool,
        progress: Progress,
        programs: Programs,
    ) -> None:
        self._config, self._run, self._source, self._declared = config, run, source, declared
        self._force, self._inproc = force, inproc
        self._progress, self._programs = progress, programs
        self._digesting: asyncio.Task[None] | None = None
        self._deployed: Mapping[str, str] = {}
        """URLs of the functions of rewards that this life has deployed."""

    async def run(self) -> Summary:
        if not self._run.config.exists():
            # before any other file: a directory with a configuration can be resumed
            self._run.write_config(self._config)
        run = self._run
        with TrajectoryStore(run.trajectories) as store, TurnLog(run.turns) as self._turn_log:
            # before hosts join: a long replay is silent, and would end their leases
            beginning = recall(recover(self._config, run, store), self._turn_log)
            summary = await self._gather_and_run(store, beginning)
            # attempts that were dropped before they could continue need no record
            self._turn_log.keep(continuable(beginning.core.state))
            return summary

    async def _gather_and_run(self, store: TrajectoryStore, beginning: Beginning) -> Summary:
        async with Tasks() as tasks:
            cluster = GatheredHosts(
                self._config.cluster,
                self._config.pools,
                self._run,
                tasks,
                relays=self._config.weights.relays,
                user=user_files.of_run(self._config, self._declared.images),
                hosted=programs_of(self._config),
                programs=self._programs,
                on_status=self._progress.phase,
            )
            try:
                await cluster.gather()
                if cluster.slots:
                    await self._must_fit(cluster.present())
                async with deployed(
                    self._config,
                    run_id=beginning.identity.id,
                    log=self._run.logs / "serverless.log",
                    on_status=self._progress.phase,
                    on_lost=lambda line: self._show(Warn(component="rewards", message=line)),
                ) as self._deployed:
                    return await self._run_on(cluster, store, beginning)
            finally:
                await cluster.close()
                tasks.cancel_all()

    async def _must_fit(self, present: Mapping[str, Resources]) -> None:
        """Raise `ConfigError` if the hosts that have joined lack memory, or if a pool
        that is needed has no host. This machine was checked before the run.
        """
        empty = empty_pools(self._config.pools, present.values())
        needed = unserved(self._config, empty)
        if needed:
            raise ConfigError("\n".join(f"{pool.field} {pool.describe()}" for pool in needed))
        for pool in empty:
            self._show(Warn(component=pool.field, message=f"{pool.describe()}: it has no host yet"))
        # in a thread, since it may import torch, which takes seconds
        words = self._declared.words
        checks = await asyncio.to_thread(check_joined, self._config, words, present)
        if self._force:
            checks = forced(checks)
            for check in checks:
                if check.name == FORCED:
                    self._show(Warn(component=FORCED, message=check.detail))
        must_pass(checks)

    async def _run_on(
        self, cluster: GatheredHosts, store: TrajectoryStore, beginning: Beginning
    ) -> Summary:
        config, run = self._config, self._run
        with contextlib.ExitStack() as stack:
            if not run.identity.exists():
                write_identity(run.identity, beginning.identity)
            clock, core = RunClock(beginning.at), beginning.core
            journal = stack.enter_context(RunJournal(run.journal))
            # all that follows happens under this configuration: begin the journal again
            if beginning.resumed:
                journal.rotate(core.snapshot())
            beginning = settle(config, run, beginning)
            sinks = open_sinks(config.run.sinks, run.path, config.model_dump(mode="json"))
            metrics = Metrics(
                run.metrics,
                clock=clock.now,
                state=lambda: core.state,
                progress=self._progress,
                sinks=sinks,
                max_gap=max_gap(config.model.dtype, config.published_dtype),
            )
            stack.callback(metrics.close)
            trace = Trace(run.trace)
            stack.callback(trace.close)
            self._announce(metrics, beginning)
            for line in torn(journal, store):
                metrics.warned(line)
            self._source.threads.on_abandoned = lambda text: metrics.warned(
                Warn(component="environment", message=text)
            )
            stack.enter_context(
                watched(show=self._show, warn=metrics.warned, trace=trace, clock=clock.now)
            )
            episodes = Episodes(
                config,
                model_dir(config, run),
                self._source,
                clock,
                run_id=beginning.identity.id,
                deployed=self._deployed,
            )
            first = self._first(beginning, cluster)
            world = self._world(
                cluster.hosts, beginning, clock, journal, store, metrics, trace, episodes
            )
            with _signals(world, self._progress):
                try:
                    cluster.report_to(world.post)
                    await world.run(first, fresh=not beginning.resumed)
                except DiskError as error:
                    raise DiskError(
                        error.errno,
                        f"{error}; {_progress_so_far(core)}; use --resume once there is space",
                    ) from error
                finally:
                    await asyncio.gather(episodes.close(), self._await_digests(metrics))
            evaluation = metrics.final_evaluation or metrics.last_evaluation
            summary = summarize(core, evaluation=evaluation, wall_s=world.ended_at)
            write_summary(run.summary, summary)
            metrics.event("finished", error=summary.error, account=account_line(summary.account))
            self._progress.phase(f"finished: {outcome_line(summary)}")
            return summary

    def _show(self, command: Warn) -> None:
        """Show a warning on the terminal only, from any thread."""
        self._progress.line(
            {"kind": "warning", "component": command.component, "message": command.message}
        )

    def _announce(self, metrics: Metrics, beginning: Beginning) -> None:
        if beginning.resumed:
            loss = lost(beginning)
            metrics.event(
                "resumed",
                events=beginning.events,
                differing=beginning.differing,
                missing=len(beginning.missing),
                recorded=loss.recorded,
                step=loss.step,
                steps_lost=loss.steps,
                trajectories_lost=loss.trajectories + loss.missing,
                seconds_lost=round(loss.seconds, 3),
                settings=list(beginning.changes),
            )
            self._progress.phase(f"resuming {loss.describe()}")
            for line in beginning.changes:
                self._progress.phase(f"changed since: {line}")
            for doubt in beginning.doubts:
                metrics.warned(doubt)
        else:
            metrics.event("started", inproc=self._inproc, engines=len(first_engines(self._config)))
            self._progress.phase("starting engines and trainer")
        if beginning.differing:
            text = (
                f"{beginning.differing} of {beginning.events} replayed events led to other "
                "commands: the code has changed since"
            )
            if functions := [f"{setting} ({name})" for setting, name in named(self._config)]:
                text += (
                    f", or that of {' or '.join(functions)}, which must always return the same "
                    "for the same arguments"
                )
            metrics.warned(Warn(component="journal", message=text))

    def _first(self, beginning: Beginning, cluster: GatheredHosts) -> RunStarted | WorldLost:
        """Return the event with which this life begins. It has the places of all
        processes.

        Raises `ConfigError` if a process has no place.
        """
        config = self._config
        slots, relays = engines_to_start(config, beginning.core.state), config.weights.relays
        hosts = cluster.slots or machine_of(config, relays=relays, inproc=self._inproc)
        config.check_on_gpus(groups_on_gpus(config, hosts))
        slots, ranks, unbound = bind_all(config, slots, hosts)
        workers, more = bind_workers(config, hosts, slots, ranks)
        if unbound or more:
            raise ConfigError("\n".join(f"{one.process}: {one.reason}" for one in unbound + more))
        if problem := crowded(config, [(one.host, one.devices) for one in ranks if one.devices]):
            raise ConfigError(f"trainer.ranks {problem}")
        return beginning.first(
            slots,
            hosts=hosts,
            ranks=ranks,
            workers=workers[: config.workers.first],
            relays=len(cluster.slots) or relays,
            life=self._turn_log.life,
        )

    def _world(
        self,
        hosts: Hosts,
        beginning: Beginning,
        clock: RunClock,
        journal: RunJournal,
        store: TrajectoryStore,
        metrics: Metrics,
        trace: Trace,
        episodes: Episodes,
    ) -> World:
        config, source = self._config, self._source
        checkpoints = Checkpoints(self._run.checkpoints)
        checkpoints.clear_unfinished()
        processes = Processes(
            config,
            self._run,
            hosts,
            words=self._declared.words,
            inproc=self._inproc,
            on_ready=functools.partial(self._on_ready, beginning.identity),
            deployed=self._deployed,
        )
        wiring = Wiring(
            config=config,
            core=beginning.core,
            clock=clock,
            journal=journal,
            store=store,
            trace=trace,
            hosts=hosts,
            make_engine=processes.engine,
            make_episode=episodes.make,
            make_worker=processes.worker,
            image_waits=episodes.image_waits,
            teacher=episodes.teacher,
            rewards_of=episodes.rewards_of,
            service_waits=episodes.service_waits,
            turn_log=self._turn_log,
        )
        self._turn_log.on_failure = lambda error: metrics.warned(unrecorded(error))
        return World(
            wiring,
            checkpoints=checkpoints,
            metrics=metrics,
            progress=self._progress,
            control=self._run.control,
            status=self._run.status,
            draw=source.draw,
            make_trainer=processes.trainer,
            open_relay=relay_in_process(
                logs=self._run.logs, start_s=BACKSTOP * self._config.watchdog.start_s
            ),
            open_predictor=processes.predictor(),
        )

    def _on_ready(self, identity: Identity) -> None:
        """Record the digests of the run's first model, once a trainer is ready and the
        model therefore exists.
        """
        if identity.model is None and self._digesting is None:
            self._digesting = asyncio.create_task(asyncio.to_thread(self._digest, identity))

    def _digest(self, identity: Identity) -> None:
        model = model_digests(model_dir(self._config, self._run))
        write_identity(self._run.identity, msgspec.structs.replace(identity, model=model))

    async def _await_digests(self, metrics: Metrics) -> None:
        if self._digesting is None:
            return
        try:
            await self._digesting
        except OSError as error:
            text = f"the digests of its files were not recorded: {error}"
            metrics.warned(Warn(component="model", message=text))


def machine_of(config: RunConfig, *, relays: int, inproc: bool) -> tuple[HostSlot, ...]:
    """Return this machine as the hosts of a run with so many relays, each with GPUs to
    which processes are bound.

    Raises `ConfigError` if the GPUs cannot be listed.
    """
    try:
        gpus = () if inproc else gpus_for(config.model.device)
    except HostError as error:
        raise ConfigError(f"model.device: {error}") from None
    return one_machine(relays, config.pools, gpus)


def torn(journal: RunJournal, store: TrajectoryStore) -> list[Warn]:
    """Return warnings of records that a killed controller left incomplete, and that
    were cut off.
    """
    sizes = (("journal", journal.torn), ("trajectories", store.torn))
    return [
        Warn(
            component=name,
            message=f"{nbytes} bytes of an incomplete last record were cut off: "
            "its writer was killed",
        )
        for name, nbytes in sizes
        if nbytes
    ]


def _progress_so_far(core: Core) -> str:
    """Describe the state of a run that must stop at once."""
    step = core.state.checkpoints.newest
    checkpoint = "no checkpoint yet" if step is None else f"last good checkpoint: step {step}"
    return f"{checkpoint}; {account_line(core.account())}"


@contextlib.contextmanager
def _signals(world: World, progress: Progress) -> Iterator[None]:
    """Stop in order at the first SIGINT or SIGTERM, and at once at the second.

    Only the main thread can receive signals.
    """
    main = asyncio.current_task()
    assert main is not None, "called from a coroutine"
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            main.cancel()
        else:
            progress.phase("stopping in order; interrupt again to stop at once")
            world.stop()

    try:
        with on_ending_signals(on_signal):
            yield
    except asyncio.CancelledError:
        if signals > 1:
            raise KeyboardInterrupt from None
        raise
