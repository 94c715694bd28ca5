"""Run a configuration to its end: `train` prepares the directory, gathers the hosts and
runs the world.

Invariants: one controller has locked the run's directory; however the run ends, none of
its processes is left; a run that ended reports why, and accounts for every trajectory
that it started.
"""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rollweave.core.core import Core
from rollweave.core.mechanisms.membership.bindings import groups_on_gpus
from rollweave.core.mechanisms.membership.members import engines_to_start, first_engines
from rollweave.core.policy.health import max_gap
from rollweave.envs.tasks import TaskSource, named
from rollweave.record.rundir import Identity, RunDir, write_identity
from rollweave.record.summary import Summary, account_line, outcome_line, summarize, write_summary
from rollweave.runtime.hosts import user_files
from rollweave.runtime.hosts.cluster import GatheredHosts, programs_of
from rollweave.runtime.hosts.serverless import check_platform, deployed
from rollweave.runtime.life import Life, Records, begun, machine_of, recorded, wired
from rollweave.runtime.metrics import Metrics, Progress, Silent, open_sinks
from rollweave.runtime.preflight.checks import FORCED, Status, forced, must_pass
from rollweave.runtime.preflight.environments import Declared
from rollweave.runtime.preflight.examiner import declared_by
from rollweave.runtime.preflight.model import check_joined
from rollweave.runtime.processes import Processes
from rollweave.runtime.recover import lost, model_digests, model_dir
from rollweave.runtime.signals import on_ending_signals, run_to_the_end
from rollweave.runtime.supervisors.relays import check_transport
from rollweave.runtime.supervisors.roles import RunRoles, opened_roles
from rollweave.runtime.tasks import Tasks
from rollweave.runtime.world import World
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, DiskError
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
    check_transport(config)
    check_installed(config)
    check_platform(config)
    if inproc:
        check_inproc(config)
    apart = config.workers.maximum > 0
    with contextlib.chdir("."):  # the user's modules may change the directory
        source = TaskSource(config, imported=not apart)
        if declared is None:
            declared = declared_by(config) if apart else Declared(words=source.words())
    with RunDir.claim(config, resume=resume) as run:
        start = _Start(
            config=config,
            run_dir=run,
            source=source,
            declared=declared,
            force=force,
            inproc=inproc,
            progress=progress or Silent(),
            programs=programs or Programs(),
        )
        return run_to_the_end(start.run())


def check_inproc(config: RunConfig) -> None:
    """Raise `ConfigError` if the run needs processes of its own."""
    if config.cluster is not None or config.trainer.elastic:
        many = "[cluster], whose hosts" if config.cluster else "a changing number of ranks, which"
        raise ConfigError(f"--inproc must be left out with {many} run processes")


@dataclasses.dataclass(kw_only=True)
class _Start:
    """One life of a run, from its directory to its summary."""

    config: RunConfig
    run_dir: RunDir
    source: TaskSource
    declared: Declared
    force: bool
    inproc: bool
    progress: Progress
    programs: Programs
    _digesting: asyncio.Task[None] | None = None

    async def run(self) -> Summary:
        # before hosts join: a long replay is silent, and would end their leases
        with recorded(self.config, self.run_dir) as records:
            return await self._gather_and_run(records)

    async def _gather_and_run(self, records: Records) -> Summary:
        async with Tasks() as tasks:
            cluster = GatheredHosts(
                self.config.cluster,
                self.config.pools,
                self.run_dir,
                tasks,
                relays=self.config.weights.relays,
                user=user_files.of_run(self.config, self.declared.images),
                hosted=programs_of(self.config),
                programs=self.programs,
                loans=self.config.run.name if self.config.loans is not None else "",
                on_status=self.progress.phase,
            )
            try:
                await cluster.gather()
                if cluster.slots:
                    await self._must_fit(cluster.present())
                async with deployed(
                    self.config,
                    run_id=records.beginning.identity.id,
                    log=self.run_dir.logs / "serverless.log",
                    on_status=self.progress.phase,
                    on_lost=lambda line: self._show(Warn(component="rewards", message=line)),
                ) as urls:
                    machine = cluster.slots or machine_of(
                        self.config, relays=self.config.weights.relays, inproc=self.inproc
                    )
                    async with opened_roles(
                        self.config,
                        self.run_dir,
                        cluster,
                        tasks,
                        machine=machine,
                        warn=self._show,
                        on_status=self.progress.phase,
                    ) as roles:
                        with begun(records) as life:
                            return await self._run_on(cluster, life, urls, roles)
            finally:
                await cluster.close()
                tasks.cancel_all()

    async def _must_fit(self, present: Mapping[str, Resources]) -> None:
        """Raise `ConfigError` if the hosts that have joined lack memory, or if a pool
        that is needed has no host. This machine was checked before the run.
        """
        # in a thread, since it may import torch, which takes seconds
        words = self.declared.words
        checks = await asyncio.to_thread(check_joined, self.config, words, present)
        checks = forced(checks) if self.force else checks
        for check in checks:
            if check.name == FORCED:
                self._show(Warn(component=FORCED, message=check.detail))
            elif check.name.startswith("pools.") and check.status is Status.WARN:
                text = f"{check.detail}: it has no host yet"
                self._show(Warn(component=check.name, message=text))
        must_pass(checks)

    async def _run_on(
        self, cluster: GatheredHosts, life: Life, deployed: Mapping[str, str], roles: RunRoles
    ) -> Summary:
        """Run the world on the hosts that have joined. `deployed` has the URLs of the
        functions of rewards that this life has deployed.
        """
        config, run, core = self.config, self.run_dir, life.beginning.core
        with contextlib.ExitStack() as stack:
            sinks = open_sinks(config.run.sinks, run.path, config.model_dump(mode="json"))
            metrics = Metrics(
                run.metrics,
                clock=life.clock.now,
                state=lambda: core.state,
                progress=self.progress,
                sinks=sinks,
                max_gap=max_gap(config.model.dtype),
            )
            stack.callback(metrics.close)
            self._announce(metrics, life)
            processes = Processes(
                config,
                run,
                cluster.hosts,
                words=self.declared.words,
                inproc=self.inproc,
                on_ready=functools.partial(self._on_ready, life.beginning.identity),
                deployed={**deployed, **roles.urls},
                roles=roles.address,
            )
            roles.warn = metrics.warned
            roles.report = lambda component, line: metrics.event(
                "waiting", component=component, message=line
            )
            wiring = stack.enter_context(
                wired(life, self.source, processes, show=self._show, warn=metrics.warned)
            )
            first = self._first(life, cluster, roles.hosts)
            world = World(wiring, metrics=metrics, progress=self.progress, draw=self.source.draw)
            with _signals(world, self.progress):
                try:
                    cluster.report_to(world.post)
                    await world.run(first)
                except DiskError as error:
                    raise DiskError(
                        error.errno,
                        f"{error}; {_progress_so_far(core)}; use --resume once there is space",
                    ) from error
                finally:
                    await self._await_digests(metrics)
            evaluation = metrics.final_evaluation or metrics.last_evaluation
            summary = summarize(core, evaluation=evaluation, wall_s=world.ended_at)
            write_summary(run.summary, summary)
            metrics.event("finished", error=summary.error, account=account_line(summary.account))
            self.progress.phase(f"finished: {outcome_line(summary)}")
            return summary

    def _show(self, command: Warn) -> None:
        """Show a warning on the terminal only, from any thread."""
        self.progress.line(
            {"kind": "warning", "component": command.component, "message": command.message}
        )

    def _announce(self, metrics: Metrics, life: Life) -> None:
        beginning = life.beginning
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
            self.progress.phase(f"resuming {loss.describe()}")
            for line in beginning.changes:
                self.progress.phase(f"changed since: {line}")
        else:
            metrics.event("started", inproc=self.inproc, engines=len(first_engines(self.config)))
            self.progress.phase("starting engines and trainer")
        for doubt in life.doubts():
            metrics.warned(doubt)
        if beginning.differing:
            text = (
                f"{beginning.differing} of {beginning.events} replayed events led to other "
                "commands: the code has changed since"
            )
            if functions := [f"{setting} ({name})" for setting, name in named(self.config)]:
                text += (
                    f", or that of {' or '.join(functions)}, which must always return the same "
                    "for the same arguments"
                )
            metrics.warned(Warn(component="journal", message=text))

    def _first(
        self, life: Life, cluster: GatheredHosts, hosts: Sequence[HostSlot]
    ) -> RunStarted | WorldLost:
        """Return the event with which this life begins, on these hosts. Raises
        `ConfigError` if a process has no place.
        """
        config = self.config
        config.check_on_gpus(groups_on_gpus(config, hosts))
        engines = engines_to_start(config, life.beginning.core.state)
        relays = len(cluster.slots) or config.weights.relays if config.relayed else 0
        return life.first(engines, hosts, relays=relays)

    def _on_ready(self, identity: Identity) -> None:
        """Record the digests of the run's first model, once a trainer is ready and the
        model therefore exists.
        """
        if identity.model is None and self._digesting is None:
            self._digesting = asyncio.create_task(asyncio.to_thread(self._digest, identity))

    def _digest(self, identity: Identity) -> None:
        model = model_digests(model_dir(self.config, self.run_dir))
        write_identity(self.run_dir.identity, msgspec.structs.replace(identity, model=model))

    async def _await_digests(self, metrics: Metrics) -> None:
        if self._digesting is None:
            return
        try:
            await self._digesting
        except OSError as error:
            text = f"the digests of its files were not recorded: {error}"
            metrics.warned(Warn(component="model", message=text))


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
