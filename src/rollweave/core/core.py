"""The core: `handle(now, event)` changes the state of the run and says what to do next.

It only routes: each kind of event goes to its sub-machine, and then every sub-machine
may use what the event made possible. It has no clock, no randomness, no I/O: the same
events at the same times give the same commands, in a live run, in its replay from the
journal, and in simulation.
"""

from collections.abc import Callable, Mapping
from typing import assert_never

import msgspec

from rollweave.core import (
    allocation,
    ending,
    engines,
    evaluation,
    groups,
    idle,
    lifecycle,
    recovery,
    relays,
    serving,
    training,
    trajectories,
    turns,
    watchdog,
)
from rollweave.core.account import Account, account
from rollweave.core.checks import check
from rollweave.core.policy.experience import Rule
from rollweave.core.run import Run
from rollweave.core.state import Phase, State
from rollweave.schema import events as e
from rollweave.schema.commands import Command
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import Event
from rollweave.schema.packing import packed


class Core:
    """The state of one run. `restore(snapshot)` gives an equal core.

    `rules` are the functions of the user's that it names.
    """

    def __init__(
        self,
        config: RunConfig,
        state: State | None = None,
        *,
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        self._run = Run(config, state if state is not None else State(), rules or {})

    @classmethod
    def restore(
        cls, snapshot: bytes, config: RunConfig, *, rules: Mapping[str, Rule] | None = None
    ) -> "Core":
        return cls(config, msgspec.msgpack.decode(snapshot, type=State), rules=rules)

    def snapshot(self) -> bytes:
        return packed(self._run.state)

    @property
    def state(self) -> State:
        """For reading only: metrics, reports and tests."""
        return self._run.state

    @property
    def finished(self) -> bool:
        return self._run.state.phase is Phase.FINISHED

    def handle(self, now: float, event: Event) -> list[Command]:
        """Take one event at time `now`, in seconds since the run began, and return the
        commands that it leads to, in order.
        """
        run = self._run
        run.now, run.out, run.touched = now, [], []
        idle.account(run)
        if self.finished and not isinstance(event, e.WorldLost):
            return []
        _route(run, event)
        lifecycle.settle(run)
        if isinstance(event, e.TurnsProgressed):
            pass  # nobody becomes free by it
        elif isinstance(event, e.TurnRequested | e.TurnDone | e.PredictionReady):
            barrier = self._run.config.rollout.env_stepping == "batch"
            turns.dispatch(
                run, None if barrier else run.touched
            )  # the most frequent events by far, and all that they make possible
        elif not self.finished:
            _use_what_is_possible(run)
        return run.out

    def account(self) -> Account:
        """Where every training trajectory went."""
        return account(self._run.state)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken.

        For tests: it walks every table.
        """
        check(self._run)


STEPS: tuple[Callable[[Run], None], ...] = (
    engines.let_go,
    ending.advance,
    groups.sweep_doomed,
    relays.advance,
    engines.update,
    training.take_batch,
    groups.sweep_doomed,
    evaluation.advance,
    allocation.advance,
    groups.launch,
    trajectories.start_inits,
    trajectories.start_evals,
    turns.dispatch,
    ending.advance,
)
"""What an event may make possible, in the order in which one thing enables the next."""


def _use_what_is_possible(run: Run) -> None:
    for step in STEPS:
        step(run)
        lifecycle.settle(run)
        if run.state.phase is Phase.FINISHED:
            return


def _route(run: Run, event: Event) -> None:
    match event:
        case e.TurnRequested():
            turns.on_requested(run, event)
        case e.TurnDone():
            turns.on_done(run, event)
        case e.TurnFailed():
            turns.on_failed(run, event)
        case e.TurnsProgressed():
            turns.on_progressed(run, event)
        case e.TurnWithdrawn():
            turns.on_withdrawn(run, event)
        case e.EnvReady():
            trajectories.on_env_ready(run, event)
        case e.PredictionReady():
            turns.on_prediction(run, event)
        case e.TrajectoryEnded():
            trajectories.on_ended(run, event)
        case e.RewardReady():
            trajectories.on_reward_ready(run, event)
        case e.RewardFailed():
            trajectories.on_reward_failed(run, event)
        case e.GroupSubmitted():
            groups.on_submitted(run, event)
        case e.DrawFailed():
            groups.on_draw_failed(run, event)
        case e.RolloutsSubmitted():
            serving.on_submitted(run, event)
        case e.RolloutAcknowledged():
            serving.on_taken(run, event)
        case e.MigrationDone():
            turns.on_migration_done(run, event)
        case e.TimerFired():
            watchdog.look(run)
        case e.StepTrained():
            training.on_trained(run, event)
        case e.WeightsPublished():
            training.on_published(run, event)
        case e.EngineSuspended():
            engines.on_suspended(run, event)
        case e.WeightsLoaded():
            engines.on_loaded(run, event)
        case e.WeightsFetched():
            relays.on_held(run, event)
        case _:
            _route_rare(run, event)


def _route_rare(
    run: Run,
    event: e.RunStarted
    | e.WorldLost
    | e.StopRequested
    | e.RolloutCancelled
    | e.EngineJoined
    | e.EngineRegistered
    | e.EngineWithdrawn
    | e.EngineLost
    | e.WeightsLoadFailed
    | e.RelayJoined
    | e.RelayLost
    | e.RelaySuspected
    | e.RelayRecovered
    | e.FetchStalled
    | e.FetchFailed
    | e.TrainerReady
    | e.TrainerLost
    | e.RatiosMeasured
    | e.TrainFailed
    | e.CheckpointCopied
    | e.CheckpointSaved
    | e.CheckpointFailed,
) -> None:
    match event:
        case e.RunStarted():
            recovery.on_started(run, event)
        case e.WorldLost():
            recovery.on_world_lost(run, event)
        case e.StopRequested():
            ending.on_stop_requested(run, drain=event.drain)
        case e.RolloutCancelled():
            serving.on_cancelled(run, event)
        case e.EngineJoined():
            engines.on_joined(run, event)
        case e.EngineRegistered():
            engines.on_registered(run, event)
        case e.EngineWithdrawn():
            engines.on_withdrawn(run, event)
        case e.EngineLost():
            engines.on_lost(run, event)
        case e.WeightsLoadFailed():
            engines.on_load_failed(run, event)
        case e.RelayJoined():
            relays.on_joined(run, event)
        case e.RelayLost():
            relays.on_lost(run, event)
        case e.RelaySuspected():
            relays.on_suspected(run, event)
        case e.RelayRecovered():
            relays.on_heard(run, event)
        case e.FetchStalled():
            relays.on_stalled(run, event)
        case e.FetchFailed():
            relays.on_refused(run, event)
        case e.TrainerReady():
            training.on_ready(run, event)
        case e.TrainerLost():
            training.on_lost(run, event)
        case e.RatiosMeasured():
            training.on_measured(run, event)
        case e.TrainFailed():
            training.on_train_failed(run, event)
        case e.CheckpointCopied():
            training.on_taken(run, event)
        case e.CheckpointSaved():
            training.on_saved(run, event)
        case e.CheckpointFailed():
            training.on_save_failed(run, event)
        case _:
            assert_never(event)
