"""The contract between the core and any world, judged from a journal: what may answer a
command, how often, and in which order.

Written from the comments of `schema/commands.py`, independently of both worlds.
"""

import math
from collections.abc import Iterable

import msgspec

from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.commands import Command
from rollweave.schema.events import Event

Attempt = tuple[str, int]
OfAttempt = (
    e.EnvReady
    | e.AttemptDelayed
    | e.TurnRequested
    | e.TurnWithdrawn
    | e.TrajectoryEnded
    | e.RewardReady
    | e.RewardFailed
)
OfRelay = e.RelayJoined | e.RelayLost | e.WeightsFetched | e.FetchFailed
OfEngine = e.EngineJoined | e.EngineSuspended | e.WeightsLoaded | e.WeightsLoadFailed | e.EngineLost
OfStaging = e.WeightsStaged | e.StagingFailed


class Referee:
    """Feed it the events and commands in order; it raises AssertionError at the first
    violation. `owed()` returns what was never answered.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.drawing: set[str] = set()
        self.stage: dict[Attempt, str] = {}  # of attempts that the world holds
        self.comparing: set[str] = set()  # groups whose members are compared
        self.cancelled: set[Attempt] = set()
        # ended by themselves while their cancellation was on its way
        self.crossed: set[Attempt] = set()
        self.turns: dict[Attempt, int] = {}  # turns requested
        self.requested: set[Attempt] = set()  # attempts that wait for their turn
        self.open: dict[Attempt, tuple[int, int]] = {}  # attempts → (turn, try) on an engine
        self.prefilling: set[Attempt] = set()  # of these: only the prompt is computed
        # attempts → a turn whose answer has crossed its abortion
        self.answered: dict[Attempt, int] = {}
        self.with_: dict[Attempt, str] = {}  # attempts → the engine that had their last turn
        # (attempt, turn, try) → tokens of it that were sampled
        self.sampled: dict[tuple[str, int, int, int], int] = {}
        self.aborted: set[tuple[str, int, int, int]] = set()
        # attempts → turn before which a prediction was requested
        self.predicting: dict[Attempt, int] = {}
        self.moving: dict[int, Attempt] = {}  # transfers under way
        self.engines: dict[str, tuple[int, str]] = {}  # engine → (epoch, what it owes)
        # engine → the weights that it is to receive while it serves, in order
        self.staging: dict[str, list[int]] = {}
        self.stages: set[str] = set()  # engines that can do so
        self.relays: dict[str, tuple[int, str]] = {}  # relay → (epoch, what it owes)
        self.silent: set[tuple[str, int]] = set()  # relays that are suspected, by epoch
        self.trainer: tuple[int, str] = (0, "start")
        self.writing: int | None = None  # step of the checkpoint that is under way
        self.measured: list[str] = []  # groups that the trainer is to measure
        self.timer = False
        self.seen: set[str] = set()

    def owed(self) -> list[str]:
        """The commands without their answer."""
        work = [
            f"{stage} of {attempt}"
            for attempt, stage in self.stage.items()
            if stage in ("init", "eval", "cancel")
        ]
        engines = [f"{owes} of {name}" for name, (_, owes) in self.engines.items() if owes]
        moves = [f"migration {number} of {attempt}" for number, attempt in self.moving.items()]
        engines += [f"staging of {name}" for name, owed in self.staging.items() if owed]
        relays = [f"{owes} of {name}" for name, (_, owes) in self.relays.items() if owes]
        return [
            *work,
            *(f"comparison of {group}" for group in self.comparing),
            *moves,
            *engines,
            *relays,
            *([self.trainer[1]] if self.trainer[1] else []),
            *sorted(self.drawing),
        ]

    def watch(self, history: Iterable[tuple[float, Event, list[Command]]]) -> None:
        for now, event, commands in history:
            assert now >= self.now, "time goes back"
            self.now = now
            self.seen.add(type(event).__name__)
            self.event(event)
            for command in commands:
                self.seen.add(type(command).__name__)
                self.command(command)

    # Events of the world.

    def event(self, event: Event) -> None:
        match event:
            case e.RunStarted() | e.WorldLost():
                for table in (
                    self.stage,
                    self.turns,
                    self.open,
                    self.requested,
                    self.cancelled,
                    self.predicting,
                    self.moving,
                ):
                    table.clear()
                self.comparing.clear()
                self.staging.clear()
                self.engines = dict.fromkeys((slot.id for slot in event.engines), (0, "join"))
                self.relays = {f"r{number}": (0, "join") for number in range(event.relays)}
                self.silent.clear()
            case e.TimerFired():
                assert self.timer, "a timer that was not set"
                self.timer = False
            case e.GroupSubmitted() | e.DrawFailed():
                assert event.group_id in self.drawing, f"{event} was not asked for"
                self.drawing.discard(event.group_id)
            case e.EnvReady():
                attempt = self._alive(event, "init", "cancel")
                if self.stage[attempt] == "init":
                    self.stage[attempt] = "ready"
            case e.AttemptDelayed():
                self._alive(event, "init", "ready", "run", "eval", "cancel")
            case e.TurnRequested():
                attempt = self._alive(event, "run", "cancel")
                if (
                    self.answered.get(attempt) != event.turn - 1
                ):  # else it is said before that answer counts, and again after it
                    assert attempt not in self.requested, f"{event} while a turn is open"
                    assert event.turn == self.turns.get(attempt, 0), f"{event} is out of order"
                assert event.context_tokens > 0
                self.turns[attempt] = event.turn + 1
                self.requested.add(attempt)
            case e.TurnWithdrawn():
                attempt = self._alive(event, "run", "cancel")
                assert attempt in self.requested or attempt in self.cancelled, (
                    f"{event} while no turn is open"
                )
                self.requested.discard(attempt)
            case e.TurnDone() | e.TurnFailed() | e.TurnReturned() | e.PrefillDone():
                self._answer(event)
            case e.TurnsProgressed(turns=turns):
                assert turns
                for turn_progress in turns:
                    attempt = (str(turn_progress.trajectory_id), turn_progress.attempt)
                    now = (turn_progress.turn, turn_progress.dispatch)
                    assert self.open.get(attempt) == now or (*attempt, *now) in self.aborted, (
                        f"{turn_progress} is of no open turn"
                    )
                    assert turn_progress.output_tokens > self.sampled.get((*attempt, *now), 0), (
                        f"{turn_progress} is no news"
                    )
                    self.sampled[*attempt, *now] = turn_progress.output_tokens
            case e.TrajectoryEnded(trajectory_id=who, attempt=number) if (
                str(who),
                number,
            ) in self.crossed:
                self.crossed.discard((str(who), number))
            case e.TrajectoryEnded():
                attempt = self._alive(event, "init", "ready", "run", "cancel")
                # its last answer, and then its end
                crossed = self.answered.get(attempt) == self.turns.get(attempt, 0) - 1
                assert attempt not in self.requested or attempt in self.cancelled or crossed, (
                    f"{event} while its turn is open"
                )
                self.requested.discard(attempt)
                if attempt in self.cancelled:
                    self._forget(attempt)
                else:
                    self.stage[attempt] = "ended"
            case e.RewardReady() | e.RewardFailed():
                attempt = self._alive(event, "eval", "cancel")
                if attempt in self.cancelled:
                    self.crossed.add(attempt)
                self._forget(attempt)
            case e.GroupCompared():
                self.comparing.discard(event.group_id)
            case e.PredictionReady():
                requested_turn = self.predicting.get((str(event.trajectory_id), event.attempt), -1)
                assert event.turn <= requested_turn, f"{event} was not asked for"
            case e.MigrationDone():
                assert self.moving.pop(event.number, None) == (
                    str(event.trajectory_id),
                    event.attempt,
                ), f"{event} ends nothing"
                assert event.moved_tokens >= 0
                assert not (event.error and event.moved_tokens), event
            case _:
                self._machine(event)

    def _machine(self, event: Event) -> None:
        match event:
            case e.EngineJoined():
                self._engine(event, "join")
                assert event.max_slots > 0
                (self.stages.add if event.stages else self.stages.discard)(event.engine_id)
            case e.EngineSuspended():
                self._engine(event, "suspend")
            case e.WeightsLoaded() | e.WeightsLoadFailed():
                self._engine(event, "load")
            case e.WeightsStaged() | e.StagingFailed():
                self._staging(event)
            case e.EngineLost():
                if self.engines.get(event.engine_id, (-1, ""))[0] == event.epoch:
                    self.staging.pop(event.engine_id, None)
                self._engine(event, self.engines.get(event.engine_id, (-1, ""))[1])
                for attempt in [
                    attempt for attempt in self.open if self.with_[attempt] == event.engine_id
                ]:
                    # its last reports are stale
                    self.aborted.add((*attempt, *self.open.pop(attempt)))
            case e.RelayJoined():
                self._relay(event, "join")
            case e.WeightsFetched() | e.FetchFailed():
                self._relay(event, f"take {event.publication_id}")
            case e.FetchStalled():
                assert event.source in self.relays, event
            case e.RelayLost():
                self._relay(event, *({self.relays[event.relay_id][1]}))
                self.silent.discard((event.relay_id, event.epoch))
            case e.RelaySuspected():
                assert self.relays[event.relay_id][1] != "join", f"{event} before it is up"
                assert (event.relay_id, event.epoch) not in self.silent, f"{event} is no news"
                self.silent.add((event.relay_id, event.epoch))
            case e.RelayRecovered():
                assert (event.relay_id, event.epoch) in self.silent, f"{event} is no news"
                self.silent.discard((event.relay_id, event.epoch))
            case e.TrainerReady():
                self._trainer(event, "start")
            case e.StepTrained():
                self._trainer(event, "train")
            case e.GroupsMeasured(groups=groups):
                self._trainer(event, "measure")
                assert [group.id for group in groups] == self.measured, (
                    f"{event} is not of what was asked"
                )
                for group in groups:
                    for value in msgspec.structs.astuple(group.measures):
                        assert value is None or 0 <= value < math.inf, group
                    assert group.measures.ratio != 0, group
            case e.TrainFailed():
                self._trainer(event, "train", "measure")
            case e.WeightsPublished():
                self._trainer(event, "publish")
            case e.CheckpointCopied():
                assert self.writing in (None, event.step), (
                    f"{event} while {self.writing} is written"
                )
                self._trainer(event, "save")
            case e.CheckpointSaved() | e.CheckpointFailed():
                assert self.writing == event.step or event.epoch != self.trainer[0], (
                    f"{event} while {self.writing} is written"
                )
                if event.epoch == self.trainer[0]:
                    self.writing = None
                    if self.trainer[1] == "save":
                        self._trainer(event, "save")
            case e.TrainerLost():
                self._trainer(event, self.trainer[1])
            case e.StopRequested() | e.EngineRegistered() | e.EngineWithdrawn():
                pass
            case e.HostLost() | e.HostJoined():
                pass  # the commands that follow end and start the processes
            case _:
                raise AssertionError(f"nobody judges {event}")

    def _alive(self, event: OfAttempt, *stages: str) -> Attempt:
        attempt = (str(event.trajectory_id), event.attempt)
        assert self.stage.get(attempt) in stages, f"{event} while it is {self.stage.get(attempt)}"
        return attempt

    def _answer(self, event: e.TurnDone | e.TurnFailed | e.TurnReturned | e.PrefillDone) -> None:
        attempt = (str(event.trajectory_id), event.attempt)
        if self.open.get(attempt) == (event.turn, event.dispatch):
            del self.open[attempt]
            prefilled = attempt in self.prefilling
            assert prefilled or not isinstance(event, e.PrefillDone), f"{event} was not asked for"
            if isinstance(event, e.TurnDone):
                assert event.output_tokens > 0
                assert event.output_tokens >= self.sampled.pop(
                    (*attempt, event.turn, event.dispatch), 0
                )
                assert event.version >= 0
                self.requested.discard(attempt)
        else:
            dispatch = (*attempt, event.turn, event.dispatch)
            assert dispatch in self.aborted, f"{event} answers nothing"
            if isinstance(event, e.TurnDone):
                self.answered[attempt] = event.turn

    def _engine(self, event: OfEngine, *owed: str) -> None:
        epoch, owes = self.engines.get(event.engine_id, (-1, ""))
        if event.epoch == epoch:
            assert owes in owed, f"{event} while it owes {owes or 'nothing'}"
            self.engines[event.engine_id] = (epoch, "")

    def _staging(self, event: OfStaging) -> None:
        epoch, owes = self.engines.get(event.engine_id, (-1, ""))
        if event.epoch == epoch:
            owed = self.staging.get(event.engine_id, [])
            assert event.publication_id in owed, f"{event} was not asked for"
            assert owes != "join", f"{event} before it is up"
            owed.remove(event.publication_id)

    def _relay(self, event: OfRelay, *owed: str) -> None:
        epoch, owes = self.relays.get(event.relay_id, (-1, ""))
        if event.epoch == epoch:
            assert owes in owed, f"{event} while it owes {owes or 'nothing'}"
            self.relays[event.relay_id] = (epoch, "")

    def _trainer(self, event: Event, *owed: str) -> None:
        epoch, owes = self.trainer
        if getattr(event, "epoch", epoch) == epoch:
            assert owes in owed, f"{event} while the trainer owes {owes or 'nothing'}"
            self.trainer = (epoch, "")

    def _forget(self, attempt: Attempt) -> None:
        for table in (self.stage, self.turns, self.open):
            table.pop(attempt, None)  # type: ignore[attr-defined]
        self.cancelled.discard(attempt)

    # Commands of the core.

    def command(self, command: Command) -> None:
        match command:
            case c.DrawTask():
                self.drawing.add(command.group_id)
            case c.StartInit():
                self.stage[str(command.trajectory_id), command.attempt] = "init"
            case c.StartRun():
                self.stage[str(command.trajectory_id), command.attempt] = "run"
            case c.StartEval():
                self.stage[str(command.trajectory_id), command.attempt] = "eval"
            case c.CompareGroup():
                assert command.group_id not in self.comparing, f"{command} twice"
                self.comparing.add(command.group_id)
            case c.CancelComparison():
                self.comparing.discard(command.group_id)
            case c.CancelTrajectory():
                attempt = (str(command.trajectory_id), command.attempt)
                assert attempt in self.stage, f"{command} of what the world does not hold"
                self.cancelled.add(attempt)
                self.stage[attempt] = "cancel"
            case c.StartTurn():
                attempt = (str(command.trajectory_id), command.attempt)
                assert attempt in self.requested, f"{command} was not asked for"
                self.open[attempt] = (command.turn, command.dispatch)
                (self.prefilling.add if command.prefill else self.prefilling.discard)(attempt)
                self.with_[attempt] = command.engine_id
            case c.AbortTurn():
                attempt = (str(command.trajectory_id), command.attempt)
                self.open.pop(attempt, None)
                self.aborted.add((*attempt, command.turn, command.dispatch))
            case c.RerankTurn():
                expected = (command.turn, command.dispatch)
                assert self.open.get((str(command.trajectory_id), command.attempt)) == expected
            case c.Predict():
                self.predicting[str(command.trajectory_id), command.attempt] = command.turn
            case c.Migrate():
                attempt = (str(command.trajectory_id), command.attempt)
                assert attempt not in self.open, f"{command} while an engine has its turn"
                assert {command.source, command.target} <= self.engines.keys()
                self.moving[command.number] = attempt
            case c.StartEngine():
                assert command.engine_id not in self.engines, (
                    f"{command} of an engine that is there"
                )
                self.engines[command.engine_id] = (0, "join")
            case c.SetTimer():
                self.timer = True
            case c.StageWeights():
                assert command.engine_id in self.stages, f"{command} of an engine that cannot"
                self.staging.setdefault(command.engine_id, []).append(command.publication_id)
            case c.SuspendEngine():
                self.engines[command.engine_id] = (self.engines[command.engine_id][0], "suspend")
            case c.LoadWeights():
                self.engines[command.engine_id] = (self.engines[command.engine_id][0], "load")
            case c.RestartEngine():
                self.staging.pop(command.engine_id, None)
                self.engines[command.engine_id] = (command.epoch, "join")
            case c.RemoveEngine():
                self.staging.pop(command.engine_id, None)
                del self.engines[command.engine_id]
            case c.FetchWeights():
                assert command.source is None or command.source in self.relays, (
                    f"{command} from a relay that is gone"
                )
                self.relays[command.relay_id] = (
                    self.relays[command.relay_id][0],
                    f"take {command.publication_id}",
                )
            case c.RestartRelay():
                self.relays[command.relay_id] = (command.epoch, "join")
            case c.RemoveRelay():
                del self.relays[command.relay_id]
            case c.TrainStep():
                self.trainer = (self.trainer[0], "train")
            case c.MeasureGroups(groups=groups):
                self.trainer = (self.trainer[0], "measure")
                self.measured = [group.id for group in groups]
            case c.PublishWeights():
                self.trainer = (self.trainer[0], "publish")
            case c.SaveCheckpoint():
                assert self.writing is None, f"{command} while {self.writing} is written"
                self.trainer, self.writing = (self.trainer[0], "save"), command.step
            case c.RestartTrainer():
                self.writing = None
                self.trainer = (command.epoch, "start")
            case (
                c.Harvest()
                | c.FitPredictor()
                | c.ResumeEngine()
                | c.Evict()
                | c.RecordEvaluation()
                | c.MarkBest()
                | c.Warn()
                | c.Finish()
            ):
                pass
