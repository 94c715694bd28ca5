"""`train`: from a configuration to a finished run. Prepares the directory, starts the
processes, and hands over to the world.

Only this module knows what runs where. Invariants: the run's directory is held by one
controller; whatever ends the run, no process of it is left; a run that ended says why
and what came of every trajectory it started.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from rollweave.core.core import Core
from rollweave.core.policy.scheduling import scheduling
from rollweave.core.seats import begun_with, first_seats
from rollweave.engine.clients.client import EngineClient
from rollweave.engine.clients.inproc import in_thread
from rollweave.engine.clients.process import in_process
from rollweave.envs.rules import named
from rollweave.envs.tasks import TaskSource
from rollweave.io.extras import how_to_install
from rollweave.record.identity import Identity, model_digests, write_identity
from rollweave.record.journal import RunJournal
from rollweave.record.rundir import RunDir
from rollweave.record.store import TrajectoryStore
from rollweave.record.summary import Summary, describe, outcome, summarize, write_summary
from rollweave.record.trace import Trace
from rollweave.runtime.checkpoints import Checkpoints
from rollweave.runtime.clock import RunClock
from rollweave.runtime.episodes import Episodes
from rollweave.runtime.links.relay import in_process as relay_in_process
from rollweave.runtime.links.trainer import (
    ProcessTrainer,
    ThreadTrainer,
    TrainerBackend,
    TrainerSpec,
)
from rollweave.runtime.loopwatch import watched
from rollweave.runtime.metrics import Metrics, Progress, Silent
from rollweave.runtime.recover import Beginning, lost, model_dir, recover, settle
from rollweave.runtime.signals import on_ending_signals, run_to_the_end
from rollweave.runtime.sinks import open_sinks
from rollweave.runtime.supervisors.predictor import OpenLink
from rollweave.runtime.supervisors.predictor import in_process as predict_in_process
from rollweave.runtime.supervisors.predictor import in_thread as predict_in_thread
from rollweave.runtime.supervisors.relays import missing_extra
from rollweave.runtime.world import World
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import ModeName
from rollweave.schema.errors import ConfigError, DiskError
from rollweave.schema.events import EngineSlot
from rollweave.schema.prediction import PredictorSpec
from rollweave.schema.serving import EngineSpec
from rollweave.train.lengths import check_installed

BACKSTOP = 2.0
"""Our own limits on a silent child, as a multiple of the core's: the core acts first,
with its own reasons.
"""


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The modules that the children run. Tests put smaller ones in their place."""

    engine: str = "rollweave.runtime.entrypoints.engine"
    trainer: str = "rollweave.runtime.entrypoints.trainer"
    relay: str = "rollweave.runtime.entrypoints.relay"


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    inproc: bool = False,
    progress: Progress | None = None,
    programs: Programs | None = None,
) -> Summary:
    """Run `config` to its end, or go on with it (`resume`), with engines and trainer as
    processes or as threads (`inproc`).

    Relays are processes in any case.

    The first SIGINT or SIGTERM asks for an orderly end; a second one ends the run at
    once, and raises KeyboardInterrupt. Raises `ConfigError` for what the user must
    change, and `DiskError` where the run's files cannot be written: what is written
    stays good, and `resume` goes on from it. What else goes wrong in the run itself is
    in the summary's `error`.
    """
    if (extra := missing_extra(config.weights)) is not None:
        raise ConfigError(
            f"weights.transport {extra} must be installed ({how_to_install(extra)}), got none"
        )
    check_installed(config.rollout)
    with contextlib.chdir("."):  # back to where we were, wherever the user's modules go
        source = TaskSource(config)
    with RunDir.claim(config, resume=resume) as run:
        start = _Start(
            config,
            run,
            source,
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
        inproc: bool,
        progress: Progress,
        programs: Programs,
    ) -> None:
        self._config, self._run, self._source = config, run, source
        self._inproc, self._progress, self._programs = inproc, progress, programs
        self._identifying: asyncio.Task[None] | None = None

    async def run(self) -> Summary:
        config, run = self._config, self._run
        with contextlib.ExitStack() as stack:
            if not run.config.exists():
                # before anything else is there: what holds a run can be resumed
                run.write_config(config)
            store = stack.enter_context(TrajectoryStore(run.trajectories))
            begun = recover(config, run, store)
            if not run.identity.exists():
                write_identity(run.identity, begun.identity)
            clock, core = RunClock(begun.at), begun.core
            journal = stack.enter_context(RunJournal(run.journal))
            # what follows happens under this configuration: the journal begins anew
            if begun.resumed:
                journal.rotate(core.snapshot())
            begun = settle(config, run, begun)
            sinks = open_sinks(config.run.sinks, run.path, config.model_dump(mode="json"))
            metrics = Metrics(
                run.metrics,
                clock=clock.now,
                state=lambda: core.state,
                progress=self._progress,
                sinks=sinks,
            )
            stack.callback(metrics.close)
            trace = Trace(run.trace)
            stack.callback(trace.close)
            self._announce(metrics, begun)
            for line in torn(journal, store):
                metrics.warned(line)
            self._source.threads.on_left = lambda text: metrics.warned(
                Warn(component="environment", message=text)
            )
            stack.enter_context(
                watched(say=self._say, warned=metrics.warned, trace=trace, clock=clock.now)
            )
            episodes = Episodes(config, model_dir(config, run), self._source, clock)
            world, seats = self._world(begun, clock, journal, store, metrics, trace, episodes)
            with _signals(world, self._progress):
                try:
                    await world.run(
                        begun.first(seats, relays=config.weights.relays),
                        engines=seats,
                        fresh=not begun.resumed,
                    )
                except DiskError as error:
                    raise DiskError(
                        error.errno,
                        f"{error}; {_standing(core)}; --resume goes on once there is room",
                    ) from error
                finally:
                    await asyncio.gather(episodes.close(), self._identified(metrics))
            evaluation = metrics.final_evaluation or metrics.last_evaluation
            summary = summarize(core, evaluation=evaluation, wall_s=world.ended_at)
            write_summary(run.summary, summary)
            metrics.event("finished", error=summary.error, account=describe(summary.account))
            self._progress.phase(f"finished: {outcome(summary)}")
            return summary

    def _say(self, command: Warn) -> None:
        """Show the warning on the terminal only; from any thread."""
        self._progress.line(
            {"kind": "warning", "component": command.component, "message": command.message}
        )

    def _announce(self, metrics: Metrics, begun: Beginning) -> None:
        if begun.resumed:
            gone = lost(begun)
            metrics.event(
                "resumed",
                events=begun.events,
                differing=begun.differing,
                missing=len(begun.missing),
                step=gone.step,
                steps_lost=gone.steps,
                trajectories_lost=gone.trajectories + gone.missing,
                seconds_lost=round(gone.seconds, 3),
                knobs=list(begun.knobs),
            )
            self._progress.phase(f"resuming {gone.words()}")
            for line in begun.knobs:
                self._progress.phase(f"changed since: {line}")
            for doubt in begun.doubts:
                metrics.warned(doubt)
        else:
            metrics.event("started", inproc=self._inproc, engines=len(first_seats(self._config)))
            self._progress.phase("starting engines and trainer")
        if begun.differing:
            text = (
                f"{begun.differing} of {begun.events} replayed events were decided otherwise: the "
                "code has changed since"
            )
            if functions := [f"{knob} ({name})" for knob, name in named(self._config)]:
                text += (
                    f", or that of {' or '.join(functions)}, which must answer the same to the "
                    "same question at any time"
                )
            metrics.warned(Warn(component="journal", message=text))

    def _world(
        self,
        begun: Beginning,
        clock: RunClock,
        journal: RunJournal,
        store: TrajectoryStore,
        metrics: Metrics,
        trace: Trace,
        episodes: Episodes,
    ) -> tuple[World, tuple[EngineSlot, ...]]:
        config, source = self._config, self._source
        checkpoints = Checkpoints(self._run.checkpoints)
        checkpoints.clear_unfinished()
        processes = Processes(
            config,
            self._run,
            words=source.words(),
            inproc=self._inproc,
            programs=self._programs,
            on_ready=functools.partial(self._on_ready, begun.identity),
        )
        world = World(
            config,
            core=begun.core,
            clock=clock,
            journal=journal,
            store=store,
            checkpoints=checkpoints,
            metrics=metrics,
            trace=trace,
            draws=source,
            make_engine=processes.engine,
            make_trainer=processes.trainer,
            open_relay=relay_in_process(logs=self._run.logs, module=self._programs.relay),
            open_predictor=processes.predictor(),
            make_episode=episodes.make,
            progress=self._progress,
            control=self._run.control,
        )
        return world, begun_with(config, begun.core.state)

    def _on_ready(self, identity: Identity) -> None:
        """Note once, when a trainer is ready and the model therefore exists, which
        files the run began with.
        """
        self._progress.phase("training" if self._config.run.steps else "evaluating")
        if identity.model is None and self._identifying is None:
            self._identifying = asyncio.create_task(asyncio.to_thread(self._identify, identity))

    def _identify(self, identity: Identity) -> None:
        model = model_digests(model_dir(self._config, self._run))
        write_identity(self._run.identity, msgspec.structs.replace(identity, model=model))

    async def _identified(self, metrics: Metrics) -> None:
        if self._identifying is None:
            return
        try:
            await self._identifying
        except OSError as error:
            metrics.warned(
                Warn(component="model", message=f"its files are not under digests: {error}")
            )


def torn(journal: RunJournal, store: TrajectoryStore) -> list[Warn]:
    """Warn of records that a killed controller left incomplete, and that were cut off."""
    found = (("journal", journal.torn), ("trajectories", store.torn))
    return [
        Warn(
            component=name,
            message=f"{nbytes} bytes of an incomplete last record were cut off: "
            "its writer was killed",
        )
        for name, nbytes in found
        if nbytes
    ]


class Processes:
    """Starts engines and trainers of one run.

    Where a model from scratch does not exist yet, the first trainer builds it.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        *,
        words: tuple[str, ...],
        inproc: bool,
        programs: Programs,
        on_ready: Callable[[], None],
        version: int = -1,
    ) -> None:
        """`on_ready` is called whenever a trainer is ready.

        `version` is what engines call the model's own weights.
        """
        self._version = version
        self._config, self._run, self._words, self._inproc = config, run, words, inproc
        self._programs, self._on_ready = programs, on_ready
        # Who plans by the cost of steps wants them measured: sharing out by length,
        # allocation, repack.
        alone = config.rollout.mode is ModeName.DECOUPLED
        self._profiles = (
            scheduling(config.rollout).by_rank or config.allocation is not None or alone
        )
        self.model_dir = model_dir(config, run)
        self._model_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.model_dir.exists():
            self._model_ready.set_result(None)

    def engine(self, seat: EngineSlot, epoch: int) -> EngineClient:
        """Start epoch `epoch` of an engine. Raises OSError."""
        engine_id, engines, watchdog = (
            seat.id,
            self._config.engines[seat.group],
            self._config.watchdog,
        )
        spec = EngineSpec(
            id=engine_id,
            model=str(self.model_dir),
            device=self._config.model.device,
            dtype=self._config.model.dtype,
            threads=seat.degree,
            max_slots=engines.max_slots,
            kv_tokens=engines.kv_tokens,
            block_tokens=engines.block_tokens,
            prefill_chunk_tokens=engines.prefill_chunk_tokens,
            prefix_cache=engines.prefix_cache,
            deterministic=engines.deterministic,
            version=self._version,
            profile=self._profiles,
        )
        if self._inproc:
            from rollweave.engine.loop import (
                EngineLoop,  # torch stays out of a controller that does not need it
            )

            link = in_thread(spec, EngineLoop, model_ready=self._model_ready)
        else:
            log = self._run.logs / f"{engine_id}.log"
            env = _threads(seat.degree)
            link = in_process(
                spec, module=self._programs.engine, log=log, env=env, model_ready=self._model_ready
            )
        name = f"engine {engine_id}.{epoch}"
        return EngineClient(
            name, link, start_s=BACKSTOP * watchdog.start_s, reply_s=BACKSTOP * watchdog.weights_s
        )

    def trainer(self, epoch: int, fresh: bool) -> TrainerBackend:
        """Start a trainer; a fresh one warms up, one that will be restored does not.

        Raises OSError.
        """
        trainer = self._config.trainer
        spec = TrainerSpec(
            config=self._config.model_dump_json(),
            model=str(self.model_dir),
            run_dir=str(self._run.path),
            world=1 if self._inproc else trainer.ranks,
            words=self._words,
            warm_up=fresh,
        )
        start_s = BACKSTOP * max(self._config.watchdog.start_s, self._config.watchdog.train_s)
        if self._inproc:
            from rollweave.runtime.entrypoints.trainer import build

            return ThreadTrainer(spec, build, start_s=start_s, on_ready=self._trainer_ready)
        env = _threads(trainer.threads)
        return ProcessTrainer(
            spec,
            module=self._programs.trainer,
            logs=self._run.logs,
            env=env,
            start_s=start_s,
            on_ready=self._trainer_ready,
        )

    def predictor(self) -> OpenLink:
        """How to start the predictor of lengths.

        The small language model that `lm` reads with is the run's own.
        """
        name = self._config.rollout.predictor
        spec = PredictorSpec(
            regressor=name, checkpoint=str(self.model_dir) if name == "lm" else None
        )
        return (
            predict_in_thread(spec)
            if self._inproc
            else predict_in_process(spec, log=self._run.logs / "predictor.log")
        )

    def _trainer_ready(self) -> None:
        if not self._model_ready.done():
            self._model_ready.set_result(None)
        self._on_ready()


def _standing(core: Core) -> str:
    """What a run that has to stop at once has come to."""
    checkpoint = core.state.checkpoint
    kept = "no checkpoint yet" if checkpoint is None else f"last good checkpoint: step {checkpoint}"
    return f"{kept}; {describe(core.account())}"


def _threads(count: int) -> Mapping[str, str]:
    """Environment of a child that computes with `count` threads."""
    return {
        "OMP_NUM_THREADS": str(count),
        "MKL_NUM_THREADS": str(count),
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextlib.contextmanager
def _signals(world: World, progress: Progress) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops in order, the second at once.

    Only the main thread can take signals.
    """
    main = asyncio.current_task()
    assert main is not None, "called from a coroutine"
    asked = 0

    def on_signal() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            main.cancel()
        else:
            progress.phase("stopping in order; once more to stop at once")
            world.stop()

    try:
        with on_ending_signals(on_signal):
            yield
    except asyncio.CancelledError:
        if asked > 1:
            raise KeyboardInterrupt from None
        raise
