"""What a world's turn log would hold, by which attempts that continue are judged."""

from collections.abc import Iterable

from rollweave.core.state import State
from rollweave.schema import commands as c
from rollweave.schema.base import TrajectoryId
from rollweave.schema.work import Purpose

Attempt = tuple[TrajectoryId, int]


class TurnRecords:
    """The weights that sampled each recorded turn: their version, and the numbers that
    tell lineages apart.
    """

    def __init__(self) -> None:
        self.turns: dict[Attempt, list[tuple[int, int]]] = {}
        self.launched_at: dict[Attempt, int] = {}
        self.lineage: dict[int, int] = {}  # version → its numbers, as last published
        self.continued: dict[Purpose, int] = {}  # attempts that continue with turns

    def publish(self, command: c.PublishWeights, numbers: int) -> None:
        self.lineage[command.version] = numbers

    def begin(self, command: c.StartInit) -> None:
        """Check what the attempt continues, and record it as its own."""
        key, turns = (command.trajectory_id, command.attempt), list[tuple[int, int]]()
        if command.continues is not None:
            former = (command.trajectory_id, command.continues.attempt)
            assert former in self.launched_at, f"{command} of what was never launched"
            assert command.initiated_version == self.launched_at[former], (
                f"{command}: staleness counts from {self.launched_at[former]}"
            )
            turns = self._usable(command, self.turns.get(former, []))
            if turns:
                self.continued[command.purpose] = self.continued.get(command.purpose, 0) + 1
        self._release(command.trajectory_id)
        self.turns[key], self.launched_at[key] = turns, command.initiated_version

    def _usable(self, command: c.StartInit, turns: list[tuple[int, int]]) -> list[tuple[int, int]]:
        assert command.continues is not None, "it continues"
        newest = command.continues.version
        for place, (version, numbers) in enumerate(turns):
            if newest is not None and version > newest:
                return turns[:place]
            assert newest is None or numbers == self.lineage[version], (
                f"{command} uses a turn of version {version} of a lost lineage"
            )
            assert command.purpose is not Purpose.EVAL or version == command.initiated_version, (
                f"{command} uses a turn of version {version}"
            )
        return turns

    def sample(self, command: c.StartTurn, version: int, numbers: int) -> None:
        """Record a turn that an engine answers."""
        self.turns[command.trajectory_id, command.attempt].append((version, numbers))

    def recorded(self, attempts: Iterable[tuple[TrajectoryId, int, str]]) -> tuple[str, ...]:
        """Return which of these lost attempts have records."""
        return tuple(one for one, attempt, _ in attempts if self.turns.get((one, attempt)))

    def evict(self, command: c.Evict, state: State) -> None:
        for trajectory_id in command.trajectory_ids:
            known = state.trajectories.get(trajectory_id)
            assert known is None or known.past.kept is None, f"{command} of what may continue"
            self._release(trajectory_id)

    def _release(self, trajectory_id: TrajectoryId) -> None:
        for key in [key for key in self.turns if key[0] == trajectory_id]:
            del self.turns[key], self.launched_at[key]
