"""The index of a run's stored attempts, which grows as the run writes.

Invariants: every record is read once; tokens are skipped, and read only for one attempt
at a time; a damaged segment is reported in one line, and all others stay readable.
"""

import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollweave.io.reading import named
from rollweave.record.record_file import HEADER
from rollweave.record.store import (
    RECORD,
    SEGMENT,
    Rescored,
    Scored,
    StoredAttempt,
    read_attempt,
    segment_path,
    segments,
)
from rollweave.schema.base import TrajectoryId
from rollweave.schema.errors import CorruptJournalError
from rollweave.schema.work import Purpose, Trajectory

PAGE = 200
"""Maximum number of attempts in one answer."""


class _Empty(msgspec.Struct):
    pass


class _Segment(msgspec.Struct):
    end: int
    version: int = -1


class _Sequence(msgspec.Struct):
    segments: tuple[_Segment, ...] = ()
    turns: tuple[_Empty, ...] = ()


class _Task(msgspec.Struct):
    id: str
    env: str
    tag: str = ""


class _Trajectory(msgspec.Struct):
    id: str
    attempt: int
    task: _Task
    initiated_version: int
    stop_reason: str
    sequences: tuple[_Sequence, ...] = ()


class _Ended(msgspec.Struct, tag="Ended"):
    at: float
    purpose: str
    member: int
    trajectory: _Trajectory


_decode = msgspec.msgpack.Decoder(_Ended | Scored | Rescored).decode


@dataclass(slots=True)
class AttemptRow:
    """An attempt without its tokens. `versions` are the lowest and the highest weight
    version that sampled tokens, or -1 if no token was sampled.
    """

    stored: StoredAttempt
    domain: str
    task: str
    initiated: int
    versions: tuple[int, int]
    turns: int
    tokens: int
    stop: str

    @property
    def reward(self) -> float | None:
        return self.stored.score.reward if self.stored.score is not None else None

    @property
    def stop_reason(self) -> str:
        """The reason at the end of EVAL if there is one, else at the end of RUN."""
        score = self.stored.score
        return score.stop_reason.value if score is not None else self.stop

    def as_object(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        stored, score = self.stored, self.stored.score
        return {
            "id": stored.trajectory_id,
            "attempt": stored.attempt,
            "purpose": stored.purpose.value,
            "at": round(stored.at, 2),
            "domain": self.domain,
            "task": self.task,
            "initiated": self.initiated,
            "versions": list(self.versions),
            "turns": self.turns,
            "tokens": self.tokens,
            "reward": self.reward,
            "success": score.success if score is not None else None,
            "stop": self.stop_reason,
        }


@dataclass(frozen=True, kw_only=True)
class Query:
    """Conditions on attempts; "" and None admit all attempts."""

    domain: str = ""
    stop: str = ""
    purpose: str = ""
    text: str = ""
    least: float | None = None
    most: float | None = None
    version: int | None = None

    def admits(self, row: AttemptRow) -> bool:
        """Return whether the attempt meets all conditions."""
        reward = row.reward
        return (
            (not self.domain or row.domain == self.domain)
            and (not self.stop or row.stop_reason == self.stop)
            and (not self.purpose or row.stored.purpose.value == self.purpose)
            and (not self.text or self.text in row.stored.trajectory_id or self.text in row.task)
            and (self.version is None or row.initiated == self.version)
            and (self.least is None or (reward is not None and reward >= self.least))
            and (self.most is None or (reward is not None and reward <= self.most))
        )


ORDERS: dict[str, Callable[[AttemptRow], float]] = {
    "newest": lambda row: -row.stored.at,
    "oldest": lambda row: row.stored.at,
    "longest": lambda row: -row.tokens,
    "turns": lambda row: -row.turns,
    "best": lambda row: -_reward(row, -float("inf")),
    "worst": lambda row: _reward(row, float("inf")),
}
"""Orders in which attempts are listed."""


def _reward(row: AttemptRow, default: float) -> float:
    return default if row.reward is None else row.reward


class AttemptIndex:
    """The attempts in the trajectory store at `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._clear()

    def _clear(self) -> None:
        self.rows: list[AttemptRow] = []
        self._of: dict[tuple[str, int], AttemptRow] = {}
        self._ends: dict[int, int] = {}
        self._inodes: dict[int, int] = {}
        self.damaged: dict[int, str] = {}
        """The line about each damaged segment."""

    def advance(self, budget_s: float) -> bool:
        """Read what was written since the last call, segment by segment, for about
        `budget_s` seconds; return whether all is read.
        """
        until = time.monotonic() + budget_s
        numbers = segments(self._directory) if self._directory.is_dir() else []
        if self._replaced(numbers):
            self._clear()
        unread = [
            number for number in numbers if number not in self.damaged and self._unread(number)
        ]
        for number in unread:
            try:
                self._read(number)
            except CorruptJournalError as error:
                self.damaged[number] = error.problem
            except FileNotFoundError:  # deleted while it was read; the next call begins anew
                return False
            except OSError as error:
                self.damaged[number] = named(error)
            if time.monotonic() >= until:
                return number == unread[-1]
        return True

    def _replaced(self, numbers: list[int]) -> bool:
        """Return whether another store has taken this one's place."""
        for number, inode in self._inodes.items():
            try:
                status = segment_path(self._directory, number).stat()
            except OSError:
                # a service deletes its oldest segments
                if number in numbers:
                    return True
                continue
            if status.st_ino != inode or status.st_size < self._ends.get(number, 0):
                return True
        return bool(self._inodes) and not numbers

    def _unread(self, number: int) -> bool:
        path = segment_path(self._directory, number)
        try:
            status = path.stat()
        except FileNotFoundError:
            return path.is_symlink()  # to nothing, which `_read` names
        except OSError:
            return True
        self._inodes[number] = status.st_ino
        if not stat.S_ISREG(status.st_mode):
            return True
        return status.st_size > max(self._ends.get(number, 0), HEADER.size)

    def _read(self, number: int) -> None:
        path = segment_path(self._directory, number)
        start = self._ends.get(number, 0)
        for record, key in SEGMENT.decoded(path, RECORD, _decode, start=start):
            match key:
                case Scored():
                    self._score(key)
                case Rescored():
                    for score in key.scores:
                        self._score(score)
                case _:
                    place = (record.end - len(record.payload), len(record.payload))
                    self._add(key, number, *place)
            self._ends[number] = record.end

    def _add(self, ended: _Ended, segment: int, offset: int, nbytes: int) -> None:
        trajectory = ended.trajectory
        stored = StoredAttempt(
            trajectory_id=TrajectoryId(trajectory.id),
            attempt=trajectory.attempt,
            purpose=Purpose(ended.purpose),
            member=ended.member,
            at=ended.at,
            segment=segment,
            offset=offset,
            nbytes=nbytes,
        )
        parts = [part for sequence in trajectory.sequences for part in sequence.segments]
        sampled = [part.version for part in parts if part.version >= 0]
        row = AttemptRow(
            stored=stored,
            domain=trajectory.task.tag or trajectory.task.env,
            task=trajectory.task.id,
            initiated=trajectory.initiated_version,
            versions=(min(sampled), max(sampled)) if sampled else (-1, -1),
            turns=sum(len(sequence.turns) for sequence in trajectory.sequences),
            tokens=sum(
                sequence.segments[-1].end for sequence in trajectory.sequences if sequence.segments
            ),
            stop=trajectory.stop_reason,
        )
        self.rows.append(row)
        self._of[trajectory.id, trajectory.attempt] = row

    def _score(self, score: Scored) -> None:
        row = self._of.get((score.trajectory_id, score.attempt))
        if row is not None:
            row.stored.score = score

    def page(self, query: Query, *, order: str, offset: int, limit: int) -> dict[str, Any]:
        """Return the attempts that `query` admits, in `order` and from `offset` on,
        with the total number of such attempts.
        """
        matching = [row for row in self.rows if query.admits(row)]
        matching.sort(key=ORDERS[order])
        return {
            "total": len(self.rows),
            "matching": len(matching),
            "rows": [row.as_object() for row in matching[offset : offset + limit]],
        }

    def domains(self) -> list[str]:
        """Return the task domains of all attempts."""
        return sorted({row.domain for row in self.rows})

    def find(self, name: str, attempt: int | None) -> AttemptRow | None:
        """Return an attempt of the trajectory `name`, by default the last."""
        if attempt is not None:
            return self._of.get((name, attempt))
        return next((row for row in reversed(self.rows) if row.stored.trajectory_id == name), None)

    def of_task(self, row: AttemptRow) -> list[AttemptRow]:
        """Return the attempts at the task of `row`, by the weights that began them."""
        same = [
            other for other in self.rows if (other.domain, other.task) == (row.domain, row.task)
        ]
        return sorted(same, key=lambda other: (other.initiated, other.stored.at))

    def beside(self, row: AttemptRow) -> list[AttemptRow]:
        """Return the attempts of the same group as `row`."""
        group = row.stored.trajectory_id.rpartition(".")[0]
        return [
            other for other in self.rows if other.stored.trajectory_id.rpartition(".")[0] == group
        ]

    def load(self, row: AttemptRow) -> Trajectory:
        """Read an attempt with its tokens. Raises CorruptJournalError."""
        return read_attempt(self._directory, row.stored)
