"""The kernel: `handle(now, event)` updates the state of the run and returns commands
that follow from the event.

It only routes: each kind of event goes to its sub-machine, the facts that this posts
are settled (`core/lifecycle`), and then every sub-machine may use what the event made
possible. It has no clock, no randomness, no I/O: the same events at the same times give
the same commands, in a live run, in its replay from the journal, and in simulation.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec

from rollweave.core import (
    dispatching,
    ending,
    engines,
    evaluation,
    groups,
    idle,
    lifecycle,
    recovery,
    serving,
    training,
    trajectories,
    turns,
    watchdog,
    weight_updates,
)
from rollweave.core.pacing import SharedPacing
from rollweave.core.policy.experience import Rule
from rollweave.core.run import Handler, Mechanism, Run, Step
from rollweave.core.state import Phase, State
from rollweave.schema import events as e
from rollweave.schema.base import packed
from rollweave.schema.commands import Command
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import Event


class Kernel:
    """The state of one run, with those of `mechanisms` that its configuration uses.

    `rules` are the user's functions that choose batches from the buffer, by the names
    that the configuration has for them.
    """

    mechanisms: ClassVar[tuple[Mechanism, ...]] = ()

    def __init__(
        self,
        config: RunConfig,
        state: State | None = None,
        *,
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        self._run = run = Run(
            config,
            state if state is not None else State(),
            rules or {},
            mechanisms=self.mechanisms,
            pacing=SharedPacing(),
            chooser=dispatching.AnyEngine(),
        )
        self._handlers = {
            kind: tuple(
                table[kind]
                for table in (*(one.handlers for one in run.mechanisms), HANDLERS)
                if kind in table
            )
            for kind in {*HANDLERS, *(kind for one in run.mechanisms for kind in one.handlers)}
        }
        self._steps = tuple(run.with_steps(STEPS))
        run.deadlines = tuple(run.with_steps(watchdog.DEADLINES))

    @classmethod
    def restore(
        cls, snapshot: bytes, config: RunConfig, *, rules: Mapping[str, Rule] | None = None
    ) -> Self:
        return cls(config, msgspec.msgpack.decode(snapshot, type=State), rules=rules)

    def snapshot(self) -> bytes:
        return packed(self._run.state)

    @property
    def state(self) -> State:
        """The state, for reading only: metrics, reports and tests."""
        return self._run.state

    @property
    def finished(self) -> bool:
        return self._run.state.phase is Phase.FINISHED

    def handle(self, now: float, event: Event) -> list[Command]:
        """Handle one event at time `now`, in seconds since the run began, and return
        the commands that follow, in order.
        """
        run = self._run
        run.now, run.out, run.dirty_queues = now, [], []
        idle.charge(run)
        if self.finished and not isinstance(event, e.WorldLost):
            return []
        kind = type(event)
        for handler in self._handlers.get(kind, ()):
            handler(run, event)
        lifecycle.settle(run)
        if kind in FREES_NOTHING:
            pass
        elif kind in FREES_TURNS:
            barrier = "free_stepping" in self._run.config.ablation.without
            dispatching.dispatch(run, None if barrier else run.dirty_queues)
        elif not self.finished:
            self._use_what_is_possible()
        return run.out

    def _use_what_is_possible(self) -> None:
        run = self._run
        for step in self._steps:
            step(run)
            if run.over:
                lifecycle.settle(run)
            if run.state.phase is Phase.FINISHED:
                return


HANDLERS: Mapping[type[Event], Handler] = {
    e.TurnRequested: turns.on_requested,
    e.TurnDone: turns.on_done,
    e.TurnFailed: turns.on_failed,
    e.TurnsProgressed: turns.on_progressed,
    e.TurnReturned: turns.on_returned,
    e.TurnWithdrawn: turns.on_withdrawn,
    e.EnvReady: trajectories.on_env_ready,
    e.AttemptDelayed: trajectories.on_delayed,
    e.TrajectoryEnded: trajectories.on_ended,
    e.RewardReady: trajectories.on_reward_ready,
    e.RewardFailed: trajectories.on_reward_failed,
    e.GroupSubmitted: groups.on_submitted,
    e.DrawFailed: groups.on_draw_failed,
    e.RolloutsSubmitted: serving.on_submitted,
    e.RolloutAcknowledged: serving.on_acknowledged,
    e.TimerFired: watchdog.on_timer,
    e.StepTrained: training.on_trained,
    e.WeightsPublished: training.on_published,
    e.EngineSuspended: weight_updates.on_suspended,
    e.WeightsStaged: weight_updates.on_staged,
    e.WeightsLoaded: weight_updates.on_loaded,
    e.RunStarted: recovery.on_started,
    e.WorldLost: recovery.on_world_lost,
    e.StopRequested: ending.on_stop_requested,
    e.RolloutCancelled: serving.on_cancelled,
    e.EngineJoined: engines.on_joined,
    e.EngineLost: engines.on_lost,
    e.StagingFailed: weight_updates.on_staging_failed,
    e.WeightsLoadFailed: weight_updates.on_load_failed,
    e.TrainerReady: training.on_ready,
    e.TrainerLost: training.on_lost,
    e.GroupsMeasured: training.on_measured,
    e.TrainFailed: training.on_train_failed,
    e.CheckpointCopied: training.on_checkpoint_copied,
    e.CheckpointSaved: training.on_checkpoint_saved,
    e.CheckpointFailed: training.on_checkpoint_failed,
}
"""The sub-machine that handles each kind of event."""

FREES_NOTHING: frozenset[type[Event]] = frozenset({e.TurnsProgressed, e.AttemptDelayed})
"""Events that make no step possible."""

FREES_TURNS: frozenset[type[Event]] = frozenset(
    {e.TurnRequested, e.PrefillDone, e.TurnDone, e.PredictionReady}
)
"""The most frequent events by far, which make nothing but turns possible."""

STEPS: tuple[tuple[str, Step | None], ...] = (
    ("end", ending.advance),
    ("drop", groups.drop_expired),
    ("update weights", weight_updates.update),
    ("train", training.take_batch),
    ("drop again", groups.drop_expired),
    ("evaluate", evaluation.advance),
    ("place processes", None),
    ("launch groups", groups.launch),
    ("start runs", trajectories.start_runs),
    ("start attempts", trajectories.start_inits),
    ("start rewards", trajectories.start_evals),
    ("dispatch turns", dispatching.dispatch),
    ("end again", ending.advance),
)
"""Steps that an event may make possible, in the order in which one enables the next,
each with a name. Mechanisms have steps before some of them.
"""
