"""The times of a recorded run: what its turns, training steps and transfers took, read
from its journal, as costs for a simulation.

Times are the controller's: from the event on which it issued a command to the event
that answers it, including the wait for a busy controller. Journals of both worlds are
supported, and must be complete: not compacted by a checkpoint.

With `cores`, the engines and the trainer of the run computed on so many cores, one
thread each, and a time is what its work would have taken on a core of its own: while
more of them computed than there were cores, each is assumed to have had an equal share.
"""

import bisect
import itertools
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rollweave.core.policy.turn_times import KEPT_OF_DOMAINS, TurnTime, TurnTimes, Worked
from rollweave.envs.tasks import rules_of
from rollweave.record.journal import Replay
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, Struct, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave_sim.cores import slowdown

SETTLED_STEPS = 3
"""Number of settled training steps from which a run is measured by them alone."""


class Timings(msgspec.Struct, kw_only=True):
    """Seconds, in the order of the run. `trained` holds tokens and seconds of every
    (mini-)batch, `turns` are the newest turns of each batch size, and `worked` what all
    of them took. `cores` are those that the processes of the run shared; 0 if each had
    its own.
    """

    trained: list[tuple[int, float]] = []
    published: list[float] = []
    loaded: list[float] = []
    swapped: list[float] = []
    saved: list[float] = []
    copied: list[float] = []
    turns: TurnTimes = msgspec.field(default_factory=TurnTimes)
    worked: Worked = msgspec.field(default_factory=Worked)
    cores: int = 0


def read_timings(journal: Path, config: RunConfig, *, cores: int = 0, warm: int = 0) -> Timings:
    """Read the journal of a run of `config`. The first `warm` training steps, and what
    took place before their end, are left out if at least `SETTLED_STEPS` follow.
    `cores` are those of the machine; runs on GPUs and runs of servers share none.

    Raises ConfigError for a compacted journal, CorruptJournalError.
    """
    if config.engines[0].server is not None:
        cores = 0
    replay, reader = (
        Replay(journal, config, rules=rules_of(config)),
        Reader(cores=cores, warm=warm),
    )
    replay.observe(reader)
    return reader.finish()


class _Begun(Struct, frozen=True):
    """A turn's start, with the engine's integrals then."""

    context: int
    at: float
    work: float
    turn_s: float
    context_s: float
    share_s: float


class _Ended(Struct, frozen=True):
    """A finished turn of an engine, which computed `prompt` tokens of its prompt at
    `prefilled` or later, and ended at `at`. `share_s` is its share of the engine's
    time.
    """

    engine: "_Engine"
    prefilled: float
    at: float
    time: TurnTime
    prompt: int
    share_s: float


class _Engine:
    """The turns of an engine, and their integrals over time: seconds of turns, of the
    tokens of their contexts, and of the work on one of the turns. It serves since
    `since`, with `threads`.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self.at = self.work = self.since = self.turn_s = self.context_s = self.share_s = 0.0
        self.suspended = False
        self.turns: dict[TrajectoryId, _Begun] = {}
        self.prompts: list[tuple[float, int]] = []  # when they were computed, and their tokens

    @property
    def computing(self) -> int:
        """Number of threads that compute."""
        return self.threads if self.turns and not self.suspended else 0

    def charge(self, now: float, work: float) -> None:
        """Add the time, and the work, since the last call. Call before turns change."""
        self.turn_s += (now - self.at) * len(self.turns)
        self.context_s += (now - self.at) * sum(turn.context for turn in self.turns.values())
        self.share_s += (work - self.work) / max(1, len(self.turns))
        self.at, self.work = now, work


class Reader:
    """Keeps the time of each request until its answer arrives. See `read_timings`."""

    def __init__(self, *, cores: int = 0, warm: int = 0) -> None:
        self._cores, self._warm = cores, warm
        self._whole, self._settled = Timings(), Timings()
        self._ended: list[tuple[_Ended, bool]] = []  # and whether the run had settled
        self._has_settled = False
        # The time in which all work so far would have been done on cores of its own.
        self._at = self._work = 0.0
        self._trainer = 0  # commands on which the trainer's process computes
        self._engines: dict[EngineId, _Engine] = {}
        self._threads: dict[EngineId, int] = {}
        self._contexts: dict[TrajectoryId, int] = {}
        self._engine_of: dict[TrajectoryId, EngineId] = {}
        # whose open turns' prompts another engine has computed, or tokens sampled
        self._split: set[TrajectoryId] = set()
        self._moved: set[TrajectoryId] = set()
        self._lengths: dict[TrajectoryId, int] = {}
        self._training: tuple[float, int] = (0.0, 0)
        self._publishing = self._saving = 0.0
        self._loading: dict[EngineId, float] = {}
        self._staging: dict[EngineId, float] = {}
        self._staged: dict[EngineId, int] = {}

    def finish(self) -> Timings:
        """Return the timings of the whole journal."""
        prompts = {id(one.engine): _Prompts(one.engine) for one, _ in self._ended}
        for one, settled in self._ended:
            step_s = one.time.seconds / one.time.output_tokens
            # what was taken up between the same two steps is computed together
            tokens = prompts[id(one.engine)].between(one.prefilled - step_s / 2, one.at)
            time = replace(one.time, prompt_tokens=tokens)
            worked = replace(time, seconds=one.share_s * time.batch)
            for timings in (self._whole, self._settled) if settled else (self._whole,):
                timings.turns.add(time, most=KEPT_OF_DOMAINS)
                timings.worked.add(worked, prompt=one.prompt, context=time.context)
        self._ended.clear()
        chosen = self._settled if len(self._settled.trained) >= SETTLED_STEPS else self._whole
        chosen.cores = self._cores
        return chosen

    def _pass(self, now: float) -> None:
        computing = sum(engine.computing for engine in self._engines.values()) + self._trainer
        self._work += (now - self._at) / slowdown(computing, self._cores)
        self._at = now

    def on_command(self, now: float, command: c.Command) -> None:
        self._pass(now)
        match command:
            case c.TrainStep():
                self._has_settled |= command.step >= self._warm
                members = [member for group in command.groups for member in group.trajectory_ids]
                self._training = self._work, sum(self._lengths[member] for member in members)
                self._trainer = 1
            case c.PublishWeights():
                self._publishing, self._trainer = self._work, 1
            case c.SaveCheckpoint():
                self._saving = self._work
            case c.StageWeights():
                self._staging[command.engine_id] = self._work
            case c.LoadWeights():
                self._loading[command.engine_id] = self._work
            case c.StartTurn():
                self._start(now, command)
            case c.AbortTurn() | c.CancelTrajectory():
                self._leave(now, command.trajectory_id)
            case c.SuspendEngine():
                self._engine(command.engine_id).suspended = True
            case c.ResumeEngine():
                engine = self._engine(command.engine_id)
                engine.since, engine.suspended = now, False
            case _:
                pass

    def _engine(self, name: EngineId) -> _Engine:
        return self._engines.setdefault(name, _Engine(self._threads.get(name, 1)))

    def _charge(self, engine: _Engine, now: float) -> None:
        self._pass(now)
        engine.charge(now, self._work)

    def _start(self, now: float, command: c.StartTurn) -> None:
        """Record the engine that samples the turn, and whether another one has begun
        to: the turn's tokens are not all of this one then.
        """
        name = command.trajectory_id
        if command.prefill:
            self._split.add(name)
            return
        self._leave(now, name)
        engine = self._engine(command.engine_id)
        self._charge(engine, now)
        context = self._contexts.get(name, 0)
        engine.turns[name] = _Begun(
            context, now, self._work, engine.turn_s, engine.context_s, engine.share_s
        )
        self._engine_of[name] = command.engine_id
        if command.dispatch != (name in self._split):
            self._moved.add(name)

    def _leave(self, now: float, name: TrajectoryId) -> None:
        """Forget a turn that did not end by itself."""
        engine_id = self._engine_of.pop(name, None)
        if engine_id is not None:
            engine = self._engine(engine_id)
            self._charge(engine, now)
            engine.turns.pop(name, None)

    def _learn(self, now: float, event: e.TurnDone) -> None:
        """Keep the turn's time, as `mechanisms/costs/rates.learn_turn` does. Left out
        are turns that have begun elsewhere, and those during which the engine loaded
        weights.
        """
        engine_id = self._engine_of.get(event.trajectory_id)
        if engine_id is None or event.replayed:
            return
        engine = self._engine(engine_id)
        self._charge(engine, now)
        began = engine.turns.get(event.trajectory_id)
        self._leave(now, event.trajectory_id)
        if began is None:
            return  # it began before the engine was lost
        prompt = max(0, began.context - event.cached_tokens)
        prefilled = began.at + event.queue_s
        engine.prompts.append((prefilled, prompt))
        elapsed, turn_s = now - began.at, engine.turn_s - began.turn_s
        moved = event.trajectory_id in self._moved
        if moved or began.at < engine.since or min(elapsed - event.queue_s, turn_s) <= 0:
            return
        time = TurnTime(
            seconds=(1 - event.queue_s / elapsed) * (self._work - began.work),
            output_tokens=max(1, event.output_tokens),
            prompt_tokens=0,  # of all turns: known when their ends are
            batch=max(1.0, turn_s / elapsed),
            # contexts grow during turns, which are half done on average
            context=(engine.context_s - began.context_s) / turn_s + event.output_tokens / 2,
        )
        share_s = engine.share_s - began.share_s
        ended = _Ended(engine, prefilled, now, time, prompt, share_s)
        self._ended.append((ended, self._has_settled))

    def on_event(self, now: float, event: e.Event) -> None:
        self._pass(now)
        match event:
            case e.RunStarted():
                self._threads = {slot.id: slot.degree for slot in event.engines}
                if any(slot.devices for slot in event.engines):
                    self._cores = 0
            case e.TurnRequested():
                self._contexts[event.trajectory_id] = event.context_tokens
                self._split.discard(event.trajectory_id)
                self._moved.discard(event.trajectory_id)
            case e.TurnDone():
                self._learn(now, event)
            case e.TurnFailed() | e.TurnWithdrawn():
                self._leave(now, event.trajectory_id)
            case e.EngineLost():
                self._engines.pop(event.engine_id, None)
            case e.TrainerLost():
                self._trainer = 0
            case e.WorldLost():  # what was under way ended with the controller
                self._trainer = 0
                for started in (self._engines, self._engine_of, self._staged):
                    started.clear()
            case e.TrajectoryEnded():
                self._lengths[event.trajectory_id] = event.tokens
            case e.WeightsStaged():
                self._keep("loaded", self._work - self._staging[event.engine_id])
                self._staged[event.engine_id] = event.publication_id
            case e.WeightsLoaded():
                staged = self._staged.get(event.engine_id) == event.publication_id
                name = "swapped" if staged else "loaded"
                self._keep(name, self._work - self._loading[event.engine_id])
            case _:
                self._of_trainer(event)

    def _of_trainer(self, event: e.Event) -> None:
        match event:
            case e.StepTrained():
                since, tokens = self._training
                self._keep("trained", (tokens, self._work - since))
                self._trainer = 0
            case e.WeightsPublished():
                self._keep("published", self._work - self._publishing)
                self._trainer = 0
            case e.CheckpointCopied():
                self._keep("copied", self._work - self._saving)
            case e.CheckpointSaved():
                self._keep("saved", self._work - self._saving)
            case _:
                pass

    def _keep(self, name: str, sample: float | tuple[int, float]) -> None:
        getattr(self._whole, name).append(sample)
        if self._has_settled:
            getattr(self._settled, name).append(sample)


class _Prompts:
    """The tokens of prompts that an engine has computed, by time."""

    def __init__(self, engine: _Engine) -> None:
        engine.prompts.sort()
        self._times = [at for at, _ in engine.prompts]
        self._sums = [0, *itertools.accumulate(tokens for _, tokens in engine.prompts)]

    def between(self, since: float, until: float) -> int:
        """Return the tokens from `since` on and before `until`."""
        first = bisect.bisect_left(self._times, since)
        return self._sums[bisect.bisect_left(self._times, until)] - self._sums[first]
