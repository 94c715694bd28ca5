"""How far turns have come that engines are long at: told to the core now and then, of
all of them at once.

Engines tell of their turns every half second; the core needs it only to know who holds
how much KV, and the journal keeps what the core is told. So a turn is told of from the
second look on, at most once a look, and only when it has come further.
"""

import asyncio
import dataclasses
from collections.abc import Callable

from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import StartTurn
from rollweave.schema.events import Event, TurnProgress, TurnsProgressed

LOOK_S = 2.0
"""Seconds between two looks: some for each plan of who moves where, which Laminar makes
every 5 s.
"""


@dataclasses.dataclass(slots=True)
class _Turn:
    command: StartTurn
    tokens: int
    said: int = 0
    seen: bool = False
    """At a look before this one."""


class Telling:
    """Remembers turns that are with an engine, and posts one event a look while there
    is news of any.
    """

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self._turns: dict[TrajectoryId, _Turn] = {}
        self._timer: asyncio.TimerHandle | None = None

    def turn_told(self, command: StartTurn, tokens: int) -> None:
        """An engine has told of the turn that `command` gave it, which has `tokens`
        tokens now.
        """
        turn = self._turns.get(command.trajectory_id)
        if turn is not None and turn.command is command:
            turn.tokens = tokens
        else:
            self._turns[command.trajectory_id] = _Turn(command, tokens)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self.look)

    def turn_left(self, trajectory_id: TrajectoryId) -> None:
        """It is with no engine any more."""
        self._turns.pop(trajectory_id, None)

    def look(self) -> None:
        """Called every `look_s` while there are turns."""
        self._timer = (
            asyncio.get_running_loop().call_later(LOOK_S, self.look) if self._turns else None
        )
        news = []
        for turn in self._turns.values():
            if turn.seen and turn.tokens > turn.said:
                turn.said = turn.tokens
                news.append(
                    TurnProgress(
                        trajectory_id=turn.command.trajectory_id,
                        attempt=turn.command.attempt,
                        turn=turn.command.turn,
                        dispatch=turn.command.dispatch,
                        output_tokens=turn.tokens,
                    )
                )
            turn.seen = True
        if news:
            self._post(TurnsProgressed(turns=tuple(news)))
