"""Begin a run: afresh, or rebuilt from its journal, which begins with a snapshot.

Invariants: a replay never executes a command; events are replayed under the
configuration under which they happened; a run starts afresh only in a directory in
which no run has left results; the directory agrees with the journal, or one error names
what is missing; the files of the model are the files with which the run began; scored
trajectories that the store lacks are named, so that the core drops them.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollweave.core.continuation import continuable
from rollweave.core.core import Core
from rollweave.core.state import ALIVE, Stage, State
from rollweave.envs.tasks import rules_of
from rollweave.io.disk import file_digest
from rollweave.io.hub import folder
from rollweave.io.reading import lines
from rollweave.io.tokenizer import tokenizer_files
from rollweave.record.journal import Replay
from rollweave.record.rundir import (
    Identity,
    Kind,
    RunDir,
    new_identity,
    read_identity,
    write_identity,
)
from rollweave.record.store import TrajectoryStore, stored_bytes
from rollweave.record.turn_log import TurnLog
from rollweave.runtime.checkpoints import Checkpoints
from rollweave.runtime.metrics import written_steps
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import Warn
from rollweave.schema.config.loading import differences, dumps, loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, DiskError

START_OVER = (
    "or start over on purpose: `rollweave train CONFIG --fresh` deletes the whole directory first"
)
START_SERVICE_OVER = "or start over on purpose, in another run.name or after deleting the directory"

MODEL_FILES = ("*.json", "*.safetensors", "*.bin", "*.model", "*.jinja", "merges.txt", "vocab.txt")
"""Patterns of the files from which a model and its tokenizer are read."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The core to continue with, the run's time, and what its first event reports.

    `events` were replayed; `differing` of them led to other commands than in the former
    life, because the code has changed since. `changes` describes each setting that
    differs from the former life's, in one line.
    """

    core: Core
    at: float
    resumed: bool
    identity: Identity
    missing: tuple[TrajectoryId, ...] = ()
    recorded: tuple[TrajectoryId, ...] = ()
    doubts: tuple[Warn, ...] = ()
    """Warnings of what is missing or was changed in the directory, which does not
    prevent the run.
    """
    events: int = 0
    differing: int = 0
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The work of the former life that a resumed run must repeat, since no checkpoint
    contains it.
    """

    step: int
    """The step from which it continues."""
    steps: int
    """Number of steps that were trained after the checkpoint, and are trained again."""
    trajectories: int
    """Number of attempts that were in flight, and start again."""
    recorded: int
    """Number of these whose turns are recorded, so that they may continue."""
    missing: int
    """Number of stored trajectories whose tokens are lost."""
    seconds: float
    """Run time from that checkpoint to the end of the former life."""

    def describe(self) -> str:
        """Return a phrase for the user."""
        where = f"at step {self.step}{' if its checkpoint is intact' if self.step else ''}"
        if not (self.steps or self.trajectories or self.missing):
            return f"{where}; nothing is lost"
        stored = (
            f"{self.missing} stored trajector{'y' if self.missing == 1 else 'ies'}, "
            if self.missing
            else ""
        )
        kept = f" (the turns of {self.recorded} are recorded)" if self.recorded else ""
        return (
            f"{where}; lost: {self.steps} trained step{'s' * (self.steps != 1)} after its "
            f"checkpoint, {self.trajectories} rollouts in flight{kept}, "
            f"{stored}{self.seconds:.0f} s"
        )


def lost(beginning: Beginning) -> Lost:
    """Return the work that a run with this beginning has lost."""
    state = beginning.core.state
    step = state.checkpoints.newest if state.checkpoints.newest is not None else 0
    in_flight = sum(
        trajectory.stage in (*ALIVE, Stage.EVAL_QUEUED)
        for trajectory in state.trajectories.values()
    )
    return Lost(
        step=step,
        steps=max(0, state.trainer.step - step),
        trajectories=in_flight,
        missing=len(beginning.missing),
        recorded=len(beginning.recorded),
        seconds=max(0.0, beginning.at - state.checkpoints.requested_at),
    )


def recover(
    config: RunConfig, run: RunDir, store: TrajectoryStore, *, serving: bool = False
) -> Beginning:
    """Return the run's beginning, checked as by `rebuild`, and bring the store in line
    with the core.
    """
    beginning = rebuild(config, run, serving=serving)
    if not beginning.resumed or not (missing := _missing(beginning.core, store)):
        return beginning
    absent = f" (missing there: {', '.join(store.absent)})" if store.absent else ""
    text = (
        f"{len(missing)} stored trajectories are not in {run.trajectories}{absent}: they are "
        "dropped as world_lost, and others are rolled out where they are still needed"
    )
    doubts = (*beginning.doubts, Warn(component="trajectories", message=text))
    return dataclasses.replace(beginning, missing=missing, doubts=doubts)


def recall(beginning: Beginning, log: TurnLog) -> Beginning:
    """Return the beginning with the attempts that may continue, whose turns the log
    has, and forget all others in the log.
    """
    log.keep(continuable(beginning.core.state))
    doubts = [
        Warn(component="turns", message=f"{text}; turns without a record are sampled again")
        for text in log.damaged
    ]
    return dataclasses.replace(
        beginning,
        recorded=tuple(trajectory_id for trajectory_id, _, _ in log.recorded),
        doubts=(*beginning.doubts, *doubts),
    )


def unrecorded(error: DiskError) -> Warn:
    """Return the warning that the turn log cannot be written."""
    return Warn(component="turns", message=f"{error}; turns that are lost are sampled again")


def settle(config: RunConfig, run: RunDir, beginning: Beginning) -> Beginning:
    """Write `config` to the directory and to the run's identity: from now on the run
    happens under it. Raises DiskError.
    """
    identity = msgspec.structs.replace(beginning.identity, config=dumps(config))
    write_identity(run.identity, identity)
    run.write_config(config)
    return dataclasses.replace(beginning, identity=identity)


def rebuild(config: RunConfig, run: RunDir, *, serving: bool = False) -> Beginning:
    """Return the run's beginning, without changing the directory.

    The former life is replayed under its own configuration. Then `config` applies,
    which may ask for more steps, but not for another model: `ConfigError` names the
    setting that must not change, what is missing from the directory, and the remedy.
    Raises `CorruptJournalError` if the journal is damaged before its end.
    """
    kind: Kind = "service" if serving else "training"
    identity = read_identity(run.identity)
    if identity is not None and identity.kind != kind:
        raise _other_kind(run, identity.kind)
    core = Core(config, rules=rules_of(config))
    fresh = Beginning(core=core, at=0.0, resumed=False, identity=identity or new_identity(kind))
    if not run.journal.exists():
        _must_be_empty(run, "is missing", serving=serving)
        return fresh
    written = run.configuration()
    former = (
        loads(identity.config, name=str(run.identity))
        if identity is not None and identity.config
        else written
    )
    if strays := config.strays_from(former):
        raise ConfigError("\n".join(strays))
    try:
        rules = rules_of(former)
    except ConfigError as error:
        raise ConfigError(
            f"the former life was decided by the run's first configuration: {error}"
        ) from error
    replay = Replay(run.journal, former, rules=rules)
    if (run_id := replay.run_id) and identity is not None and run_id != identity.id:
        raise ConfigError(
            f"{run.journal} must be the journal of run {identity.id}, as {run.identity.name} says, "
            f"got that of run {run_id}; bring the right one back, {_start_over(serving)}"
        )
    core = replay.finish()
    at = core.state.idle.clock
    if at is None:  # the run was killed before its first event, or its records are lost
        _must_be_empty(run, "has no complete record", serving=serving)
        return fresh
    if core.state.serving is not serving:
        raise _other_kind(run, "service" if core.state.serving else "training")
    _must_know_checkpoints(run, core.state)
    _must_have_its_model(config, run, identity)
    core = Core.restore(core.snapshot(), config, rules=rules_of(config))
    return Beginning(
        core=core,
        at=at,
        resumed=True,
        identity=identity or Identity(id=core.state.run_id, kind=kind),
        events=replay.events,
        differing=replay.differing,
        changes=tuple(differences(former, config)),
        doubts=tuple(_doubts(run, core.state, identity, differences(former, written))),
    )


def _doubts(
    run: RunDir, state: State, identity: Identity | None, edited: list[str]
) -> Iterator[Warn]:
    if identity is None and state.run_id:
        text = (
            f"{run.identity.name} is missing, so that journal and model were not checked to be the "
            "run's own; it is written again"
        )
        yield Warn(component="run", message=text)
    if edited:
        yield Warn(
            component="config",
            message=f"{run.config.name} has changed since the run wrote it: {'; '.join(edited)}",
        )
    unknown = sorted(set(range(state.checkpoints.newest or 0)) - written_steps(run.metrics))
    if unknown:
        text = (
            f"{run.metrics.name} has no readable line of {len(unknown)} trained steps from "
            f"{unknown[0]} to {unknown[-1]}: the report lacks them"
        )
        yield Warn(component="metrics", message=text)


def _other_kind(run: RunDir, kind: str) -> ConfigError:
    if kind == "training":
        return ConfigError(
            f"run.name: {run.path} holds a training run; choose another name for the service"
        )
    if kind == "service":
        return ConfigError(
            f"--resume: {run.path} holds a service, which `rollweave serve` "
            "resumes; choose another run.name"
        )
    return ConfigError(
        f"run.name: {run.path} holds a simulation, which cannot be resumed; choose another run.name"
    )


def _start_over(serving: bool) -> str:
    return START_SERVICE_OVER if serving else START_OVER


def _must_be_empty(run: RunDir, journal: str, *, serving: bool) -> None:
    """Raise ConfigError if a run has left results that a fresh start would delete or
    mix with its own.
    """
    results = list(_results(run))
    if results:
        raise ConfigError(
            f"{'run.name' if serving else '--resume'}: {run.path} holds {', '.join(results)}, but "
            f"{run.journal.name} {journal}: the run's state is unknown, and nothing was changed; "
            f"bring the journal back, {_start_over(serving)}"
        )


def _results(run: RunDir) -> Iterator[str]:
    if steps := Checkpoints(run.checkpoints).steps():
        yield f"{_steps(steps)} of its checkpoints"
    if nbytes := stored_bytes(run.trajectories):
        yield f"{nbytes:,} bytes of trajectories"
    if run.metrics.exists() and any(b'"kind": "step"' in line for line in lines(run.metrics)):
        yield f"{run.metrics.name} of trained steps"
    if run.summary.exists():
        yield run.summary.name


def _must_know_checkpoints(run: RunDir, state: State) -> None:
    """Check that the journal has lost no records: it records the request for a
    checkpoint before the checkpoint exists.
    """
    checkpoints = Checkpoints(run.checkpoints)
    checkpoints.return_replaced()
    there = checkpoints.steps()
    # The state of an earlier version did not record requests.
    of_earlier_version = (
        state.checkpoints.newest is not None
        and state.checkpoints.newest_requested < state.checkpoints.newest
    )
    unknown = [step for step in there if step > state.checkpoints.newest_requested]
    if unknown and not of_earlier_version:
        raise ConfigError(
            f"{run.journal}: its last record is of step {state.trainer.step}, "
            f"{state.idle.clock:.1f} s into the run, but {_steps(unknown)} of {run.checkpoints} "
            "came later: the journal has lost its end; restore the complete journal, "
            f"{_start_over(False)}; an exported checkpoint begins a new run by model.path = "
            f"{str(checkpoints.path(there[-1]) / 'hf')!r}"
        )
    steps_needed = [
        step for step in (state.checkpoints.newest, state.checkpoints.previous) if step is not None
    ]
    if steps_needed and not any(step in there for step in steps_needed):
        existing = _steps(there) if there else "no checkpoint"
        raise ConfigError(
            f"{run.checkpoints} must hold step {steps_needed[0]}, where {run.journal.name} "
            f"resumes, found {existing}; bring it back, {_start_over(False)}"
        )


def _must_have_its_model(config: RunConfig, run: RunDir, identity: Identity | None) -> None:
    if identity is None or identity.model is None:
        return
    directory = model_dir(config, run)
    if wrong := changed_files(directory, identity.model):
        raise ConfigError(
            f"the model must stay as the run began with it: {'; '.join(wrong)}; bring the former "
            f"files back, {_start_over(False)}"
        )


def model_dir(config: RunConfig, run: RunDir) -> Path:
    """Return the path of the model that the run begins with; the first trainer builds a
    model from scratch there.
    """
    return folder(config.model.path).absolute() if config.model.path is not None else run.model


def _steps(steps: list[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def _missing(core: Core, store: TrajectoryStore) -> tuple[TrajectoryId, ...]:
    """Return the scored trajectories whose tokens are lost, and remove those from the
    store's index that have not ended as far as the core knows.
    """
    trajectories = core.state.trajectories
    ended_ids = {
        name
        for name, trajectory in trajectories.items()
        if trajectory.stage in (Stage.SCORED, Stage.ENDED)
    }
    store.forget([name for name in store.ids() if name not in ended_ids])
    return tuple(
        trajectory.id
        for trajectory in trajectories.values()
        if trajectory.stage is Stage.SCORED
        and store.scored_attempt(trajectory.id) != trajectory.attempt
    )


def model_digests(directory: Path) -> dict[str, tuple[int, str]]:
    """Return size and digest of every file from which the model in `directory` is read.

    Raises OSError.
    """
    files = {file for pattern in MODEL_FILES for file in directory.glob(pattern) if file.is_file()}
    files |= {directory / name for name in tokenizer_files(directory)}
    return {
        str(file.relative_to(directory)): (file.stat().st_size, file_digest(file))
        for file in sorted(files)
    }


def changed_files(directory: Path, known: dict[str, tuple[int, str]]) -> list[str]:
    """Compare the model in `directory` with the digests taken at the start; return one
    phrase for each file that differs.
    """
    try:
        digests = model_digests(directory)
    except OSError as error:
        return [f"{directory} cannot be read: {error}"]
    names = sorted(known.keys() | digests.keys())
    pairs = [(name, known.get(name), digests.get(name)) for name in names]
    return [
        f"{directory / name} {_difference(before, now)}"
        for name, before, now in pairs
        if before != now
    ]


def _difference(before: tuple[int, str] | None, now: tuple[int, str] | None) -> str:
    if now is None:
        return "is missing"
    return "was not there" if before is None else "has changed"
