"""A world in mode decoupled whose turns and transfers a test completes by hand."""

from collections import deque

from rollweave.core.core import Core
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TaskId, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Limits, StopReason, Task
from tests.support.core import config

E0, E1, E2 = EngineId("e0"), EngineId("e1"), EngineId("e2")


class Hand:
    """A world that at once answers everything but turns, transfers, training and its
    restarts, which are left to the test.
    """

    def __init__(self, run_config: RunConfig, *, slots: int = 2, **rules: object) -> None:
        self.slots = slots
        self.core = Core(run_config, rules=rules)  # type: ignore[arg-type]
        self.now = 0.0
        self.turns: dict[TrajectoryId, c.StartTurn] = {}
        self.moves: list[c.Migrate] = []
        self.steps: list[c.TrainStep] = []
        self.measures: list[c.MeasureGroups] = []
        self.restarts: list[c.RestartTrainer] = []
        self.evaluations: list[c.RecordEvaluation] = []
        self.loads: list[c.LoadWeights] = []
        self.finish: c.Finish | None = None
        self.refused: set[int] = set()
        self.damaged: set[int] = set()  # checkpoints
        self.silent = False  # checkpoints are read, and not to the end
        self.saves: list[c.SaveCheckpoint] = []
        self.epochs: dict[EngineId, int] = {}
        engine_slots = tuple(
            e.EngineSlot(id=EngineId(f"e{n}")) for n in range(run_config.engines[0].count)
        )
        self.feed(e.RunStarted(engines=engine_slots))
        for slot in engine_slots:
            self.join(slot.id)
        self.feed(e.TrainerReady(epoch=0, step=0))

    def join(self, engine_id: EngineId) -> None:
        epoch = self.epochs.setdefault(engine_id, 0)
        self.feed(
            e.EngineJoined(
                engine_id=engine_id, epoch=epoch, max_slots=self.slots, kv_total_tokens=1000
            )
        )

    def feed(self, event: e.Event) -> None:
        inbox = deque([event])
        while inbox:
            for command in self.core.handle(self.now, inbox.popleft()):
                inbox.extend(self.answer(command))
            self.core.check()

    def answer(self, command: c.Command) -> list[e.Event]:
        match command:
            case c.DrawTask():
                task = Task(
                    id=TaskId(f"{command.group_id}"),
                    env=command.name,
                    seed=0,
                    limits=Limits(step_s=1e6),
                )
                return [e.GroupSubmitted(group_id=command.group_id, task=task)]
            case c.StartInit():
                return [
                    e.EnvReady(
                        trajectory_id=command.trajectory_id,
                        attempt=command.attempt,
                        prompt_tokens=7,
                    )
                ]
            case c.StartRun():
                return [self.requests(command.trajectory_id, attempt=command.attempt)]
            case c.StartTurn():
                self.turns[command.trajectory_id] = command
            case c.AbortTurn():
                del self.turns[command.trajectory_id]
            case c.StartEval():
                return [
                    e.RewardReady(
                        trajectory_id=command.trajectory_id, attempt=command.attempt, reward=1.0
                    )
                ]
            case c.CancelTrajectory():
                self.turns.pop(command.trajectory_id, None)
                key = {"trajectory_id": command.trajectory_id, "attempt": command.attempt}
                return [e.TrajectoryEnded(**key, stop_reason=command.reason)]
            case c.SuspendEngine():
                return [
                    e.EngineSuspended(
                        engine_id=command.engine_id, epoch=self.epochs[command.engine_id]
                    )
                ]
            case c.LoadWeights():
                self.loads.append(command)
                epoch, publication_id = self.epochs[command.engine_id], command.publication_id
                key = {
                    "engine_id": command.engine_id,
                    "epoch": epoch,
                    "publication_id": publication_id,
                }
                from_memory = command.from_checkpoint is None
                if self.silent and not from_memory:
                    return []
                if (
                    from_memory and publication_id in self.refused
                ) or command.from_checkpoint in self.damaged:
                    return [e.WeightsLoadFailed(**key, error="nobody has them")]
                return [e.WeightsLoaded(**key, version=command.version)]
            case c.PublishWeights():
                epoch = self.core.state.trainer.epoch
                return [
                    e.WeightsPublished(
                        epoch=epoch, version=command.version, publication_id=command.publication_id
                    )
                ]
            case c.SaveCheckpoint():
                self.saves.append(command)
                return [e.CheckpointSaved(epoch=self.core.state.trainer.epoch, step=command.step)]
            case c.TrainStep():
                self.steps.append(command)
            case c.MeasureGroups():
                self.measures.append(command)
            case c.RestartTrainer():
                self.restarts.append(command)
            case c.Migrate():
                self.moves.append(command)
            case c.RestartEngine():
                self.epochs[command.engine_id] = command.epoch
            case c.RecordEvaluation():
                self.evaluations.append(command)
            case c.Finish():
                self.finish = command
            case _:
                pass
        return []

    def requests(
        self, trajectory_id: TrajectoryId, *, attempt: int = 0, context: int = 10
    ) -> e.TurnRequested:
        turn = self.core.state.trajectories[trajectory_id].turns_requested
        return e.TurnRequested(
            trajectory_id=trajectory_id, attempt=attempt, turn=turn, context_tokens=context
        )

    # What a test does.

    def on(self, engine_id: EngineId) -> list[TrajectoryId]:
        """Trajectories with a turn there."""
        return [name for name, turn in self.turns.items() if turn.engine_id == engine_id]

    def done(self, trajectory_id: TrajectoryId, *, tokens: int = 3) -> None:
        """Answer its turn."""
        turn = self.turns.pop(trajectory_id)
        key = {"trajectory_id": trajectory_id, "attempt": turn.attempt}
        version = self.core.state.engines[turn.engine_id].version
        done = e.TurnDone(
            **key,
            turn=turn.turn,
            dispatch=turn.dispatch,
            output_tokens=tokens,
            cached_tokens=0,
            version=version,
        )
        self.feed(done)

    def end(self, trajectory_id: TrajectoryId) -> None:
        """Answer its turn, and end the trajectory."""
        attempt = self.turns[trajectory_id].attempt
        self.done(trajectory_id)
        key = {"trajectory_id": trajectory_id, "attempt": attempt}
        self.feed(e.TrajectoryEnded(**key, stop_reason=StopReason.FINISHED, turns=1, tokens=3))

    def train(self) -> None:
        """Finish the step under way."""
        step = self.steps[-1]
        self.feed(
            e.StepTrained(epoch=self.core.state.trainer.epoch, step=step.step, part=step.part)
        )

    def train_without(self, excluded: list[TrajectoryId], *, version: int = 1) -> None:
        """Finish and train on other trajectories, until that version is published."""
        while self.core.state.publication.version < version:
            if self.steps and self.steps[-1].step == self.core.state.trainer.step:
                self.train()
            else:
                self.end(next(name for name in self.turns if name not in excluded))

    def lose(self, engine_id: EngineId) -> None:
        for name in self.on(engine_id):
            del self.turns[name]
        self.feed(e.EngineLost(engine_id=engine_id, epoch=self.epochs[engine_id], error="killed"))

    def lose_trainer(self) -> None:
        self.feed(e.TrainerLost(epoch=self.core.state.trainer.epoch, error="killed"))

    def restore_trainer(self, step: int) -> None:
        self.feed(e.TrainerReady(epoch=self.core.state.trainer.epoch, step=step))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(e.TimerFired())

    def moved(self, command: c.Migrate, error: str = "") -> None:
        self.moves.remove(command)
        done = e.MigrationDone(
            number=command.number,
            trajectory_id=command.trajectory_id,
            attempt=command.attempt,
            moved_tokens=0 if error else 5,
            error=error,
        )
        self.feed(done)


def decoupled_config(
    engines: int = 2,
    *,
    batch: int = 2,
    steps: int = 20,
    groups: int = 1,
    **sections: dict[str, object],
) -> RunConfig:
    rollout = {
        "groups_per_step": groups,
        "group_size": 2,
        "max_running": batch * engines,
        **sections.pop("rollout", {}),
    }
    return config(
        "decoupled",
        steps=steps,
        rollout=rollout,
        tasks=[{"env": "a"}],
        engines={"count": engines, "max_slots": max(2, -(-batch // 2))},
        eval={"every": 0, "final_episodes": 0, **sections.pop("eval", {})},
        run={"checkpoint_every": None, **sections.pop("run", {})},
        watchdog={
            "turn_s": 1e6,
            "train_s": 1e7,
            **sections.pop("watchdog", {}),
        },
        **sections,
    )


def misassigned(hand: Hand) -> list[TrajectoryId]:
    """Engine 0 has version 1, and engine 1 alone has version 0. A checkpoint holds
    version 0. Return the trajectories on engine 1.
    """
    state = hand.core.state
    hand.train_without(hand.on(E1))
    while state.engines[E0].version == 0:
        hand.end(hand.on(E0)[0])
    assert [engine.version for engine in state.engines.values()] == [1, 0]
    assert state.publication.checkpointed[0] == 0
    return hand.on(E1)
