"""One life of a run or a service: its records, the beginning to which they lead, and
the parts of its world.

Invariants: the caller has claimed the directory; what the records of the former life
lack is found before anything changes; all that happens in this life is recorded under
its configuration.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollweave.core.continuation import continuable
from rollweave.core.mechanisms.membership.bindings import (
    bind_all,
    bind_workers,
    crowded,
    one_machine,
)
from rollweave.core.mechanisms.membership.members import ranks_to_start
from rollweave.engine.clients.base import Generates
from rollweave.envs.tasks import TaskSource
from rollweave.record.journal import RunJournal
from rollweave.record.rundir import RunDir, write_identity
from rollweave.record.store import TrajectoryStore
from rollweave.record.trace import LIMIT, Trace
from rollweave.record.turn_log import TurnLog
from rollweave.runtime.episodes import Episodes
from rollweave.runtime.hosts.hosts import gpus_for
from rollweave.runtime.loopwatch import watched
from rollweave.runtime.processes import Processes
from rollweave.runtime.pump import RunClock
from rollweave.runtime.recover import Beginning, model_dir, recall, recover, settle, unrecorded
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, HostError
from rollweave.schema.events import EngineSlot, RunStarted, WorldLost
from rollweave.schema.hosts import HostSlot


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records of a directory, and the beginning to which they lead."""

    config: RunConfig
    run: RunDir
    store: TrajectoryStore
    turn_log: TurnLog
    beginning: Beginning


@dataclass(frozen=True, kw_only=True)
class Life(Records):
    """A life that has begun."""

    clock: RunClock
    journal: RunJournal
    trace: Trace

    def doubts(self) -> list[Warn]:
        """Return warnings of what is missing or was changed in the directory, and of
        records that a killed controller left incomplete, and that were cut off.
        """
        sizes = (("journal", self.journal.torn), ("trajectories", self.store.torn))
        torn = [
            Warn(
                component=name,
                message=f"{nbytes} bytes of an incomplete last record were cut off: "
                "its writer was killed",
            )
            for name, nbytes in sizes
            if nbytes
        ]
        return [*self.beginning.doubts, *torn]

    def first(
        self,
        engines: Iterable[EngineSlot],
        hosts: Sequence[HostSlot],
        *,
        relays: int = 0,
        serving: bool = False,
    ) -> RunStarted | WorldLost:
        """Return the event with which this life begins. It has the places of all
        processes; of the trainer, unless the life is that of a service.

        Raises ConfigError if a process has no place.
        """
        config = self.config
        number = 0 if serving else ranks_to_start(config, self.beginning.core.state)
        slots, ranks, unbound = bind_all(config, engines, hosts, ranks=number)
        workers, more = bind_workers(config, hosts, slots, ranks)
        if unbound or more:
            raise ConfigError("\n".join(f"{one.process}: {one.reason}" for one in unbound + more))
        if problem := crowded(config, [(one.host, one.devices) for one in ranks if one.devices]):
            raise ConfigError(f"trainer.ranks {problem}")
        present: dict[str, Any] = {
            "engines": slots,
            "hosts": tuple(hosts),
            "ranks": ranks,
            "workers": workers[: config.workers.first],
            "relays": relays,
            "life": self.turn_log.life,
        }
        begun = self.beginning
        if begun.resumed:
            return WorldLost(missing=begun.missing, recorded=begun.recorded, **present)
        return RunStarted(serving=serving, run_id=begun.identity.id, **present)


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The parts from which a world is made."""

    life: Life
    processes: Processes
    episodes: Episodes
    """Makes the attempts in this process. The world closes them."""
    make_engine: Callable[[EngineSlot, int], Generates]
    """Starts an epoch of an engine. Raises OSError or `EngineError`."""


@contextlib.contextmanager
def recorded(config: RunConfig, run: RunDir, *, serving: bool = False) -> Iterator[Records]:
    """Open the records of `run`, and replay its journal."""
    if not run.config.exists():
        # before any other file: a directory with a configuration can be resumed
        run.write_config(config)
    with TrajectoryStore(run.trajectories) as store, TurnLog(run.turns) as turn_log:
        beginning = recall(recover(config, run, store, serving=serving), turn_log)
        yield Records(config=config, run=run, store=store, turn_log=turn_log, beginning=beginning)
        # attempts that were dropped before they could continue need no record
        turn_log.keep(continuable(beginning.core.state))


@contextlib.contextmanager
def begun(records: Records, *, limit: int = LIMIT, renew: bool = False) -> Iterator[Life]:
    """Begin a life under the configuration. `limit` and `renew` are those of its
    trace.
    """
    config, run, beginning = records.config, records.run, records.beginning
    with contextlib.ExitStack() as stack:
        if not run.identity.exists():
            write_identity(run.identity, beginning.identity)
        clock = RunClock(beginning.at)
        journal = stack.enter_context(RunJournal(run.journal))
        # all that follows happens under this configuration: begin the journal again
        if beginning.resumed:
            journal.rotate(beginning.core.snapshot())
        beginning = settle(config, run, beginning)
        trace = Trace(run.trace, limit=limit, renew=renew)
        stack.callback(trace.close)
        yield Life(
            config=config,
            run=run,
            store=records.store,
            turn_log=records.turn_log,
            beginning=beginning,
            clock=clock,
            journal=journal,
            trace=trace,
        )


@contextlib.contextmanager
def wired(
    life: Life,
    source: TaskSource,
    processes: Processes,
    *,
    show: Callable[[Warn], None],
    warn: Callable[[Warn], None],
    make_engine: Callable[[EngineSlot, int], Generates] | None = None,
) -> Iterator[Wiring]:
    """Yield the parts of a world whose tasks come from `source`, and watch its event
    loop.

    `show` shows a warning at once, from any thread; `warn` records it. Without
    `make_engine`, engines are `processes`. Raises ConfigError for a reward whose
    function or token is missing.
    """
    life.turn_log.on_failure = lambda error: warn(unrecorded(error))
    source.threads.on_abandoned = lambda text: warn(Warn(component="environment", message=text))
    episodes = Episodes(
        life.config,
        model_dir(life.config, life.run),
        source,
        life.clock,
        run_id=life.beginning.identity.id,
        deployed=processes.deployed,
    )
    with watched(show=show, warn=warn, trace=life.trace, clock=life.clock.now):
        yield Wiring(
            life=life,
            processes=processes,
            episodes=episodes,
            make_engine=make_engine or processes.engine,
        )


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
