"""Periodic reports to the core of how many tokens each long turn has sampled.

Engines report their turns every half second. The core needs the numbers only to know
which trajectory holds how much KV, and the journal stores every report. So a turn is
reported from the second interval on, at most once per interval, and only if it has
progressed.
"""

import asyncio
import dataclasses
from collections.abc import Callable

from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import StartTurn
from rollweave.schema.events import TURN_REPORT_INTERVAL_S, Event, TurnProgress, TurnsProgressed


@dataclasses.dataclass(slots=True)
class _Turn:
    command: StartTurn
    tokens: int
    reported: int = 0
    pending: bool = False
    """True if the turn was present at the report before this one."""


class ProgressReporter:
    """Tracks the turns that engines are sampling, and posts one event per interval if
    any of them has progressed.
    """

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self._turns: dict[TrajectoryId, _Turn] = {}
        self._timer: asyncio.TimerHandle | None = None

    def on_tokens(self, command: StartTurn, tokens: int) -> None:
        """Record that the engine has sampled `tokens` tokens of the turn that `command`
        started.
        """
        turn = self._turns.get(command.trajectory_id)
        if turn is not None and turn.command is command:
            turn.tokens = tokens
        else:
            self._turns[command.trajectory_id] = _Turn(command, tokens)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TURN_REPORT_INTERVAL_S, self.report)

    def remove(self, trajectory_id: TrajectoryId) -> None:
        """Stop tracking the trajectory's turn: no engine is sampling it."""
        self._turns.pop(trajectory_id, None)

    def report(self) -> None:
        """Post the progress since the last report; called every
        `TURN_REPORT_INTERVAL_S` while there are turns.
        """
        self._timer = (
            asyncio.get_running_loop().call_later(TURN_REPORT_INTERVAL_S, self.report)
            if self._turns
            else None
        )
        progressed = []
        for turn in self._turns.values():
            if turn.pending and turn.tokens > turn.reported:
                turn.reported = turn.tokens
                progressed.append(
                    TurnProgress(
                        trajectory_id=turn.command.trajectory_id,
                        attempt=turn.command.attempt,
                        turn=turn.command.turn,
                        dispatch=turn.command.dispatch,
                        output_tokens=turn.tokens,
                    )
                )
            turn.pending = True
        if progressed:
            self._post(TurnsProgressed(turns=tuple(progressed)))
