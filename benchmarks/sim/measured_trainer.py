"""Timings of a recorded run, read from its journal: its pace, and its trainer's times
as costs for a simulation.

Times are the controller's: from the event on which it issued a command to the event
that answers it, including the wait for a busy controller. Journals of both worlds are
supported, and must be complete: not compacted by a checkpoint.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollweave.envs.rules import rules_of
from rollweave.record.journal import Replay
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError


class Timings(msgspec.Struct, kw_only=True):
    """Seconds, in the order of the run. `trained` holds tokens and seconds of every
    (mini-)batch.

    `ready_at` is the time at which the first engine had its first weights, `ended_at`
    the end of the last step; `tokens` were sampled in between. `prepared` is from each
    attempt's start of RUN to its first turn.
    """

    ready_at: float | None = None
    ended_at: float | None = None
    steps: int = 0
    tokens: int = 0
    events: int = 0
    trained: list[tuple[int, float]] = []
    published: list[float] = []
    loaded: list[float] = []
    swapped: list[float] = []
    saved: list[float] = []
    copied: list[float] = []
    prepared: list[float] = []

    @property
    def wall_s(self) -> float:
        """Return the run's seconds. Raises ConfigError where no step was trained."""
        if self.ready_at is None or self.ended_at is None:
            raise ConfigError("the run must have trained a step, but has trained none")
        return self.ended_at - self.ready_at

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def read_timings(journal: Path, config: RunConfig) -> Timings:
    """Read the journal of a run of `config`.

    Raises ConfigError for a compacted one, CorruptJournalError.
    """
    replay, reader = Replay(journal, config, rules=rules_of(config)), _Reader()
    replay.observe(reader)
    reader.timings.events = replay.events
    return reader.timings


class _Reader:
    """Keeps the time of each request until its answer arrives."""

    def __init__(self) -> None:
        self.timings = Timings()
        self._tokens = 0
        self._lengths: dict[TrajectoryId, int] = {}
        self._training: tuple[float, int] = (0.0, 0)
        self._publishing = self._saving = 0.0
        self._loading: dict[EngineId, float] = {}
        self._staging: dict[EngineId, float] = {}
        self._staged: dict[EngineId, int] = {}
        self._preparing: dict[TrajectoryId, float] = {}

    def on_command(self, now: float, command: c.Command) -> None:
        match command:
            case c.TrainStep():
                members = [member for group in command.groups for member in group.trajectory_ids]
                self._training = now, sum(self._lengths[member] for member in members)
            case c.PublishWeights():
                self._publishing = now
            case c.SaveCheckpoint():
                self._saving = now
            case c.StageWeights():
                self._staging[command.engine_id] = now
            case c.LoadWeights():
                self._loading[command.engine_id] = now
            case c.StartRun():
                self._preparing[command.trajectory_id] = now
            case _:
                pass

    def on_event(self, now: float, event: e.Event) -> None:
        timings = self.timings
        match event:
            case e.TurnRequested():
                since = self._preparing.pop(event.trajectory_id, None)
                if since is not None:
                    timings.prepared.append(now - since)
            case e.TurnDone():
                self._tokens += event.output_tokens
            case e.TrajectoryEnded():
                self._lengths[event.trajectory_id] = event.tokens
            case e.StepTrained():
                since, tokens = self._training
                timings.trained.append((tokens, now - since))
                timings.steps, timings.ended_at, timings.tokens = event.step + 1, now, self._tokens
            case e.WeightsPublished():
                timings.published.append(now - self._publishing)
            case e.WeightsStaged():
                timings.loaded.append(now - self._staging[event.engine_id])
                self._staged[event.engine_id] = event.publication_id
            case e.WeightsLoaded():
                staged = self._staged.get(event.engine_id) == event.publication_id
                seconds = timings.swapped if staged else timings.loaded
                seconds.append(now - self._loading[event.engine_id])
                if timings.ready_at is None:
                    timings.ready_at = now
            case e.CheckpointCopied():
                timings.copied.append(now - self._saving)
            case e.CheckpointSaved():
                timings.saved.append(now - self._saving)
            case _:
                pass


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return constant and slope, neither negative, that minimize the squared errors."""
    if not points:
        raise ConfigError("a recorded trainer must have trained a step, but has trained none")
    mean_x, mean_y = statistics.fmean(x for x, _ in points), statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    constant = mean_y - slope * mean_x
    if slope < 0:
        return mean_y, 0.0
    if constant < 0:
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return constant, slope


class MeasuredTrainer:
    """The trainer of a recorded run: a line through its steps, medians of all other
    times (0 without samples).
    """

    def __init__(self, timings: Timings) -> None:
        """Raises ConfigError where the run has trained no step."""
        self.constant, self.per_token = fit_line(timings.trained)
        self._publish_s, self._load_s, self._swap_s, self._save_s, self._copy_s = (
            statistics.median(seconds) if seconds else 0.0
            for seconds in (
                timings.published,
                timings.loaded,
                timings.swapped,
                timings.saved,
                timings.copied,
            )
        )

    def step_s(self, *, tokens: int, context: int) -> float:
        """See `TrainerCosts`.

        The price of a token includes attention, since steps of one run have similar
        lengths.
        """
        del context
        return self.constant + self.per_token * tokens

    def publish_s(self) -> float:
        return self._publish_s

    def load_s(self, *, engines: int, tp: int) -> float:
        """Use the recorded time, for any number of engines."""
        del engines, tp
        return self._load_s

    def hop_s(self, *, share: float) -> float:
        """Use the time of an engine's full load: relays were not recorded
        separately.
        """
        return share * self._load_s

    def lag_s(self) -> float:
        return 0.0

    def beside_s(self, *, engines: int, tp: int) -> float:
        return self.load_s(engines=engines, tp=tp)

    def swap_s(self, *, engines: int, tp: int) -> float:
        """Use the recorded time between the suspension and the swap of staged
        weights.
        """
        del engines, tp
        return self._swap_s

    def copy_s(self) -> float:
        return self._copy_s

    def checkpoint_s(self) -> float:
        return max(0.0, self._save_s - self._copy_s)

    def saved_s(self, *, engines: int) -> float:
        """Use the time of writing: reading was seldom recorded."""
        return engines * self._save_s
