"""The service's memory of what was asked for: a SQLite file beside the journal.

Invariants: a request is in the file before it is answered with yes; a result's place is in the file before the core is told
that it was taken; so what a restarted service does not know was never accepted, and what it accepted ends in a result or in
the core's hands. One process at a time.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollweave.rollout.store import Entry
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.service import RolloutRequest
from rollweave.schema.work import Task

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, request BLOB NOT NULL, task BLOB NOT NULL,
    left INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS results (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER NOT NULL, member TEXT UNIQUE NOT NULL, attempt INTEGER NOT NULL,
    stop_reason TEXT NOT NULL, entry BLOB
);
CREATE INDEX IF NOT EXISTS results_of ON results (job);
CREATE TABLE IF NOT EXISTS engines (id TEXT PRIMARY KEY, request BLOB NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for as `id`; its group in the core is named by `number`. `left` members are not done."""

    number: int
    id: str
    request: RolloutRequest
    task: Task
    left: int

    @property
    def group_id(self) -> GroupId:
        return GroupId(f"r{self.number}")


@dataclass(frozen=True, slots=True)
class Result:
    """A member that is done. `entry` is its place in the store; None where it never began."""

    number: int
    job: int
    member: TrajectoryId
    attempt: int
    stop_reason: str
    entry: Entry | None


def job_number(member: TrajectoryId) -> int:
    """Of the job that this trajectory belongs to."""
    return int(member.removeprefix("r").partition(".")[0])


class Jobs:
    """Raises `sqlite3.Error` where the disk refuses."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    # Requests.

    def add(self, requests: Sequence[tuple[str, RolloutRequest, Task]]) -> list[Job]:
        """Note all of these, (id, request, task), or none. Ids must be new."""
        added = []
        with self._transaction():
            for job_id, request, task in requests:
                row = (job_id, msgspec.json.encode(request), msgspec.json.encode(task), request.members)
                number = self._db.execute("INSERT INTO jobs (id, request, task, left) VALUES (?, ?, ?, ?)", row).lastrowid
                assert number is not None, "an inserted row has a number"
                added.append(Job(number, job_id, request, task, request.members))
        return added

    def find(self, job_id: str) -> Job | None:
        row = self._db.execute("SELECT number, id, request, task, left FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return _job(row) if row is not None else None

    def unfinished(self) -> list[Job]:
        """In the order in which they came."""
        rows = self._db.execute("SELECT number, id, request, task, left FROM jobs WHERE left > 0 ORDER BY number")
        return [_job(row) for row in rows]

    def id_of(self, number: int) -> str | None:
        row = self._db.execute("SELECT id FROM jobs WHERE number = ?", (number,)).fetchone()
        return row[0] if row is not None else None

    # Results.

    def done(self, member: TrajectoryId, attempt: int, stop_reason: str, entry: Entry | None, *, keep: int) -> Result | None:
        """Note a result, and forget jobs that are older than the newest `keep` results. None if it is known already."""
        job = job_number(member)
        blob = msgspec.json.encode(entry) if entry is not None else None
        with self._transaction():
            row = (job, member, attempt, stop_reason, blob)
            insert = "INSERT OR IGNORE INTO results (job, member, attempt, stop_reason, entry) VALUES (?, ?, ?, ?, ?)"
            cursor = self._db.execute(insert, row)
            if not cursor.rowcount or cursor.lastrowid is None:
                return None
            self._db.execute("UPDATE jobs SET left = left - 1 WHERE number = ?", (job,))
            oldest = cursor.lastrowid - keep
            self._db.execute(
                "DELETE FROM jobs WHERE left = 0 AND number IN (SELECT job FROM results WHERE number <= ?)", (oldest,)
            )
            self._db.execute("DELETE FROM results WHERE number <= ?", (oldest,))
        return Result(cursor.lastrowid, job, member, attempt, stop_reason, entry)

    def results(self, job: int) -> list[Result]:
        rows = self._db.execute(f"{_RESULTS} WHERE job = ? ORDER BY number", (job,))
        return [_result(row) for row in rows]

    def since(self, number: int, limit: int) -> list[Result]:
        """The first `limit` results after number `number`."""
        rows = self._db.execute(f"{_RESULTS} WHERE number > ? ORDER BY number LIMIT ?", (number, limit))
        return [_result(row) for row in rows]

    def last(self) -> int:
        """Number of the newest result; 0 before the first."""
        return int(self._db.execute("SELECT COALESCE(MAX(number), 0) FROM results").fetchone()[0])

    # Engines.

    def engines(self) -> Iterator[tuple[str, bytes]]:
        """Id and request of those that are registered."""
        yield from self._db.execute("SELECT id, request FROM engines ORDER BY id").fetchall()

    def add_engine(self, engine_id: str, request: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO engines (id, request) VALUES (?, ?)", (engine_id, request))

    def remove_engine(self, engine_id: str) -> None:
        self._db.execute("DELETE FROM engines WHERE id = ?", (engine_id,))

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._db)


class _Transaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")


_RESULTS = "SELECT number, job, member, attempt, stop_reason, entry FROM results"


def _job(row: tuple[int, str, bytes, bytes, int]) -> Job:
    number, job_id, request, task, left = row
    decoded = msgspec.json.decode(request, type=RolloutRequest)
    return Job(number, job_id, decoded, msgspec.json.decode(task, type=Task), left)


def _result(row: tuple[int, int, TrajectoryId, int, str, bytes | None]) -> Result:
    number, job, member, attempt, stop_reason, blob = row
    entry = msgspec.json.decode(blob, type=Entry) if blob is not None else None
    return Result(number, job, member, attempt, stop_reason, entry)
