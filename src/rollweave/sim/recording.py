"""A journal, read as what happened to every training attempt in it: when each of its
stages and turns began and ended.

Times that no event tells (when INIT and EVAL began) are those of the commands
`StartInit` and `StartEval`, which the core gives again when it is fed the journal; so
reading needs the run's `config.toml` beside the journal, and refuses a journal on which
today's core decides otherwise. Of a journal that a checkpoint has compacted, attempts
that began before it are left out.
"""

from pathlib import Path

import msgspec

from rollweave.envs.rules import rules_of
from rollweave.record.journal import Replay
from rollweave.record.rundir import RunDir
from rollweave.schema import events as e
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import StartEval, StartInit
from rollweave.schema.config.loading import load
from rollweave.schema.errors import ConfigError, CorruptJournalError
from rollweave.schema.work import Purpose, StopReason


class Attempt(msgspec.Struct, kw_only=True):
    """One attempt. Times are seconds of the run's clock, as the controller saw them;
    None is what did not happen.

    `asked` is time and context tokens of every turn's request, `said` time and output
    tokens of its answer, `tokens` the length at the end. `stop` is how INIT and RUN
    ended, `cut` why the attempt was cancelled after that.
    """

    domain: str
    group: str
    member: int
    number: int
    begun: float
    ready: float | None = None
    asked: list[tuple[float, int]] = []
    said: list[tuple[float, int]] = []
    ended: float | None = None
    stop: StopReason | None = None
    tokens: int = 0
    cut: StopReason | None = None
    eval_begun: float | None = None
    eval_ended: float | None = None
    reward: float | None = None
    success: bool | None = None
    reward_failed: StopReason | None = None


Key = tuple[TrajectoryId, int]


def read(path: Path) -> list[Attempt]:
    """The training attempts of a run directory, or of the journal in it, as they began.

    Raises ConfigError.
    """
    journal = RunDir(path).journal if path.is_dir() else path
    if not journal.is_file():
        raise ConfigError(f"workload: {path} must hold a run's {journal.name}, found none")
    config = RunDir(journal.parent).config
    if not config.is_file():
        raise ConfigError(
            f"workload: {journal} must have the run's {config.name} beside it, found none"
        )
    try:
        return _attempts(journal, config)
    except (CorruptJournalError, msgspec.MsgspecError, OSError) as error:
        raise ConfigError(
            f"workload: {journal} must be a whole journal of this version: {error}"
        ) from error


def _attempts(journal: Path, config: Path) -> list[Attempt]:
    settings, found = load(config), dict[Key, Attempt]()
    replay = Replay(journal, settings, rules=rules_of(settings))
    for now, event, commands in replay:
        if replay.differing:
            raise ConfigError(
                f"workload: {journal} must lead to the decisions recorded in it, event "
                f"{replay.events} at {now:.3f} s does "
                "not: it was recorded by other code, or with another configuration"
            )
        _take(found, now, event)
        for command in commands:
            if isinstance(command, StartInit) and command.purpose is Purpose.TRAIN:
                found[command.trajectory_id, command.attempt] = Attempt(
                    domain=replay.core.state.groups[command.group_id].name,
                    group=command.group_id,
                    member=command.member,
                    number=command.attempt,
                    begun=now,
                )
            elif isinstance(command, StartEval):
                scored = found.get((command.trajectory_id, command.attempt))
                if scored is not None:
                    scored.eval_begun = now
    return list(found.values())


def _take(found: dict[Key, Attempt], now: float, event: e.Event) -> None:
    """Note the event with the attempt that it is about, if it is about one of ours."""
    if not isinstance(
        event,
        e.EnvReady
        | e.TurnRequested
        | e.TurnDone
        | e.TrajectoryEnded
        | e.RewardReady
        | e.RewardFailed,
    ):
        return
    attempt = found.get((event.trajectory_id, event.attempt))
    if attempt is None:
        return
    match event:
        case e.EnvReady():
            attempt.ready = now
        case e.TurnRequested():
            if event.turn == len(attempt.asked):
                attempt.asked.append((now, event.context_tokens))
        case e.TurnDone():
            if event.turn == len(attempt.said):
                attempt.said.append((now, event.output_tokens))
        case e.TrajectoryEnded():
            if attempt.stop is None:
                attempt.ended, attempt.stop, attempt.tokens = now, event.stop_reason, event.tokens
            else:
                attempt.cut = event.stop_reason
        case e.RewardReady():
            attempt.eval_ended, attempt.reward, attempt.success = now, event.reward, event.success
        case e.RewardFailed():
            attempt.eval_ended, attempt.reward_failed = now, event.stop_reason
