"""A journal read as the timeline of every training attempt: start and end of its stages
and turns.

Times that no event carries (the start of INIT and EVAL) are those of the commands
`StartInit` and `StartEval`, which the core issues again when the journal is replayed;
so reading needs the run's `config.toml` beside the journal, and rejects a journal on
which the current core decides differently. Attempts that began before a compacted
journal's checkpoint are left out.
"""

from pathlib import Path

import msgspec

from rollweave.envs.tasks import rules_of
from rollweave.record.journal import Replay
from rollweave.record.rundir import RunDir
from rollweave.schema import events as e
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import StartEval, StartInit
from rollweave.schema.config.loading import load
from rollweave.schema.errors import ConfigError, CorruptJournalError
from rollweave.schema.work import Purpose, StopReason


class Attempt(msgspec.Struct, kw_only=True):
    """One attempt. Times are seconds of the run's clock, as the controller observed
    them; None marks an event that did not happen.

    `requests` has time and context tokens of every turn's request, `replies` time and
    output tokens of its answer, `tokens` the final length. `stop` is the stop reason of
    INIT and RUN, `cut` the reason of a later cancellation.
    """

    domain: str
    group: str
    member: int
    number: int
    started: float
    ready: float | None = None
    requests: list[tuple[float, int]] = []
    replies: list[tuple[float, int]] = []
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
    """Return the training attempts of a run directory, or of the journal in it, by
    start time.

    Raises ConfigError.
    """
    journal = RunDir(path).journal if path.is_dir() else path
    if not journal.is_file():
        raise ConfigError(f"workload: {path} must contain a run's {journal.name}, got none")
    config = RunDir(journal.parent).config
    if not config.is_file():
        raise ConfigError(
            f"workload: {journal} must have the run's {config.name} beside it, got none"
        )
    try:
        return _attempts(journal, config)
    except (CorruptJournalError, msgspec.MsgspecError, OSError) as error:
        raise ConfigError(
            f"workload: {journal} must be a complete journal of this version: {error}"
        ) from error


def _attempts(journal: Path, config: Path) -> list[Attempt]:
    settings, attempts = load(config), dict[Key, Attempt]()
    replay = Replay(journal, settings, rules=rules_of(settings))
    for now, event, commands in replay:
        if replay.differing:
            raise ConfigError(
                f"workload: {journal} must lead to the decisions recorded in it, event "
                f"{replay.events} at {now:.3f} s does not: it was recorded by other code, or with "
                "another configuration"
            )
        _apply(attempts, now, event)
        for command in commands:
            if isinstance(command, StartInit) and command.purpose is Purpose.TRAIN:
                attempts[command.trajectory_id, command.attempt] = Attempt(
                    domain=replay.core.state.groups[command.group_id].name,
                    group=command.group_id,
                    member=command.member,
                    number=command.attempt,
                    started=now,
                )
            elif isinstance(command, StartEval):
                scored = attempts.get((command.trajectory_id, command.attempt))
                if scored is not None:
                    scored.eval_begun = now
    return list(attempts.values())


def _apply(attempts: dict[Key, Attempt], now: float, event: e.Event) -> None:
    """Apply the event to the attempt that it concerns, if that is in `attempts`."""
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
    attempt = attempts.get((event.trajectory_id, event.attempt))
    if attempt is None:
        return
    match event:
        case e.EnvReady():
            attempt.ready = now
        case e.TurnRequested():
            if event.turn == len(attempt.requests):
                attempt.requests.append((now, event.context_tokens))
        case e.TurnDone():
            if event.turn == len(attempt.replies):
                attempt.replies.append((now, event.output_tokens))
        case e.TrajectoryEnded():
            if attempt.stop is None:
                attempt.ended, attempt.stop, attempt.tokens = now, event.stop_reason, event.tokens
            else:
                attempt.cut = event.stop_reason
        case e.RewardReady():
            attempt.eval_ended, attempt.reward, attempt.success = now, event.reward, event.success
        case e.RewardFailed():
            attempt.eval_ended, attempt.reward_failed = now, event.stop_reason
