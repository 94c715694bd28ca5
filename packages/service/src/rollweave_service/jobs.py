"""The job database of a service: a SQLite file beside the journal, with requests,
results and registered engines.

Invariants: a request is in the file before it is accepted; a result's place is in the
file before it is acknowledged to the core; so a request that a restarted service does
not know was never accepted, and one that it accepted has a result or is known to the
core; a job is deleted with the last of its results, never before; job numbers are never
used again. The file is locked: one process at a time may use it.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollweave.record.store import StoredAttempt
from rollweave.schema.base import GroupId, TrajectoryId, as_json
from rollweave.schema.errors import ConfigError, DiskError
from rollweave.schema.work import Task
from rollweave_service.messages import RolloutRequest

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL,
    request BLOB NOT NULL, task BLOB NOT NULL,
    left INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS results (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER NOT NULL,
    member TEXT UNIQUE NOT NULL, attempt INTEGER NOT NULL,
    stop_reason TEXT NOT NULL, entry BLOB
);
CREATE INDEX IF NOT EXISTS results_of ON results (job);
CREATE INDEX IF NOT EXISTS results_in ON results (json_extract(CAST(entry AS TEXT), '$.segment'));
CREATE TABLE IF NOT EXISTS engines (id TEXT PRIMARY KEY, request BLOB NOT NULL);
"""


_DISK_CODES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
)
"""SQLite's error codes for a failing disk, as opposed to a wrong file."""


@dataclass(frozen=True, slots=True)
class Job:
    """An accepted request. `number` names its group in the core."""

    number: int
    id: str
    request: RolloutRequest
    task: Task
    members_left: int
    """Number of members that are not done."""

    @property
    def group_id(self) -> GroupId:
        return GroupId(f"r{self.number}")


@dataclass(frozen=True, slots=True)
class Result:
    """A member of a job that is done.

    `entry` is its place in the trajectory store, None if it never began.
    """

    number: int
    job: int
    member: TrajectoryId
    attempt: int
    stop_reason: str
    entry: StoredAttempt | None
    members_left: int = 0
    """Number of members of its job that were not done when it was recorded."""


def job_of_group(group_id: str) -> int:
    """Return the number of the job whose group this is."""
    return int(group_id.removeprefix("r"))


def job_of_member(member: TrajectoryId) -> int:
    """Return the number of the job to which a trajectory belongs."""
    return job_of_group(member.partition(".")[0])


class JobStore:
    """The open database. Every method raises DiskError if the disk fails; nothing of
    that call is stored then.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises ConfigError if it is damaged, in use, or not
        a job database.
        """
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            # another program that reads the file would block our event loop
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
            self.unfinished_bytes: int = self._db.execute(_UNFINISHED_BYTES).fetchone()[0]
            """Bytes of the requests and tasks of unfinished jobs: about as much as the
            core keeps in memory for them.
            """
        except sqlite3.Error as error:
            self._db.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK_CODES:
                raise self._disk_error(error) from error
            raise ConfigError(
                f"{path} must be the job database of a service, neither damaged nor in use: {error}"
            ) from error

    def close(self) -> None:
        self._db.close()

    # Requests.

    def add(
        self, requests: Sequence[tuple[str, RolloutRequest, Task]], *, max_bytes: int
    ) -> list[Job] | None:
        """Store all of these (id, request, task), or none. Ids must be new.

        Returns None if `unfinished_bytes` would exceed `max_bytes`.
        """
        rows = [(one[0], as_json(one[1]), as_json(one[2]), one[1].members) for one in requests]
        added_bytes = sum(len(request) + len(task) for _, request, task, _ in rows)
        if self.unfinished_bytes + added_bytes > max_bytes:
            return None
        jobs = []
        with self._transaction():
            for row, (job_id, request, task) in zip(rows, requests, strict=True):
                number = self._execute(
                    "INSERT INTO jobs (id, request, task, left) VALUES (?, ?, ?, ?)", row
                ).lastrowid
                assert number is not None, "an inserted row has a number"
                jobs.append(Job(number, job_id, request, task, request.members))
        self.unfinished_bytes += added_bytes
        return jobs

    def last_job_number(self) -> int:
        """Return the number of the newest job that was ever added; 0 before the
        first.
        """
        row = self._execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
        return int(row[0]) if row is not None else 0

    def find(self, job_id: str) -> Job | None:
        row = self._execute(f"{_JOBS} WHERE id = ?", (job_id,)).fetchone()
        return _job(row) if row is not None else None

    def unfinished_jobs(self) -> list[Job]:
        """Return the jobs with members that are not done, in order of arrival."""
        rows = self._execute(f"{_JOBS} WHERE left > 0 ORDER BY number")
        return [_job(row) for row in rows]

    def delete_unreadable(self) -> Iterator[tuple[str, str]]:
        """Delete each job whose request or task cannot be read; yield its id and the
        reason. Call this before any other method that reads jobs.
        """
        for row in self._execute(f"{_JOBS} ORDER BY number").fetchall():
            try:
                _job(row)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                with self._transaction():
                    self._execute("DELETE FROM results WHERE job = ?", (row[0],))
                    self._execute("DELETE FROM jobs WHERE number = ?", (row[0],))
                self.unfinished_bytes -= len(row[2]) + len(row[3]) if row[4] else 0
                yield row[1], str(error)

    def jobs_after(self, number: int, limit: int, *, unfinished: bool) -> list[Job]:
        """Return the first `limit` jobs after number `number`, in order of arrival;
        with `unfinished`, only unfinished ones.
        """
        statement = f"{_JOBS} WHERE number > ? AND left >= ? ORDER BY number LIMIT ?"
        rows = self._execute(statement, (number, int(unfinished), limit))
        return [_job(row) for row in rows]

    def id_of(self, number: int) -> str | None:
        row = self._execute("SELECT id FROM jobs WHERE number = ?", (number,)).fetchone()
        return row[0] if row is not None else None

    # Results.

    def record_result(
        self,
        member: TrajectoryId,
        attempt: int,
        stop_reason: str,
        entry: StoredAttempt | None,
        *,
        keep: int,
    ) -> Result | None:
        """Store a result, and delete finished jobs that have none among the newest
        `keep` results.

        Returns None if the result is known, or its job deleted.
        """
        job = job_of_member(member)
        blob = as_json(entry) if entry is not None else None
        with self._transaction():
            row = {
                "job": job,
                "member": member,
                "attempt": attempt,
                "stop_reason": stop_reason,
                "entry": blob,
            }
            cursor = self._execute(_INSERT_RESULT, row)
            if not cursor.rowcount or cursor.lastrowid is None:
                return None
            members_left, nbytes = self._execute(_COUNT_DOWN, (job,)).fetchone()
            expired = cursor.lastrowid - keep
            self._execute(_DELETE_JOBS, (expired, expired))
            self._execute(_DELETE_RESULTS, (expired,))
        self.unfinished_bytes -= 0 if members_left else nbytes
        return Result(cursor.lastrowid, job, member, attempt, stop_reason, entry, members_left)

    def segments(self) -> set[int]:
        """Return the segments of the trajectory store that hold results."""
        return {segment for (segment,) in self._execute(_SEGMENTS) if segment is not None}

    def results_of(self, job: int) -> list[Result]:
        rows = self._execute(f"{_RESULTS} WHERE job = ? ORDER BY number", (job,))
        return [_result(row) for row in rows]

    def results_after(self, number: int, limit: int, *, job: int | None = None) -> list[Result]:
        """Return the first `limit` results after number `number`, of one job or of
        all.
        """
        where, values = (
            ("number > ?", (number, limit))
            if job is None
            else ("job = ? AND number > ?", (job, number, limit))
        )
        rows = self._execute(f"{_RESULTS} WHERE {where} ORDER BY number LIMIT ?", values)
        return [_result(row) for row in rows]

    def last_result_number(self) -> int:
        """Return the number of the newest result; 0 before the first."""
        return int(self._execute("SELECT COALESCE(MAX(number), 0) FROM results").fetchone()[0])

    # Engines.

    def engines(self) -> Iterator[tuple[str, bytes]]:
        """Yield the id and the encoded request of each registered engine."""
        yield from self._execute("SELECT id, request FROM engines ORDER BY id").fetchall()

    def add_engine(self, engine_id: str, request: bytes) -> None:
        self._execute(
            "INSERT OR REPLACE INTO engines (id, request) VALUES (?, ?)", (engine_id, request)
        )

    def remove_engine(self, engine_id: str) -> None:
        self._execute("DELETE FROM engines WHERE id = ?", (engine_id,))

    def erase_engine(self, engine_id: str) -> None:
        """Remove an engine, and erase its bytes from the file: a registration by an
        earlier version of Rollweave may hold a password.
        """
        self._execute("PRAGMA secure_delete=ON")
        self.remove_engine(engine_id)
        self._execute("PRAGMA secure_delete=OFF")
        self._execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk may have ended the transaction
                self._execute("ROLLBACK")
            raise

    def _execute(
        self, statement: str, values: Sequence[object] | Mapping[str, object] = ()
    ) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise self._disk_error(error) from error

    def _disk_error(self, error: sqlite3.Error) -> DiskError:
        return DiskError(0, f"cannot write {self._path}: {error}")


# INSERT OR IGNORE would use up a number even if it inserts nothing.
_INSERT_RESULT = """
INSERT INTO results (job, member, attempt, stop_reason, entry)
SELECT :job, :member, :attempt, :stop_reason, :entry
WHERE EXISTS (SELECT 1 FROM jobs WHERE number = :job)
AND NOT EXISTS (SELECT 1 FROM results WHERE member = :member)
"""
_DELETE_JOBS = """
DELETE FROM jobs WHERE left = 0 AND number IN (SELECT job FROM results WHERE number <= ?)
AND NOT EXISTS (SELECT 1 FROM results WHERE job = jobs.number AND number > ?)
"""
_DELETE_RESULTS = "DELETE FROM results WHERE number <= ? AND job NOT IN (SELECT number FROM jobs)"
_COUNT_DOWN = (
    "UPDATE jobs SET left = left - 1 WHERE number = ? RETURNING left, LENGTH(request) + "
    "LENGTH(task)"
)
_UNFINISHED_BYTES = (
    "SELECT COALESCE(SUM(LENGTH(request) + LENGTH(task)), 0) FROM jobs WHERE left > 0"
)
_SEGMENTS = "SELECT DISTINCT json_extract(CAST(entry AS TEXT), '$.segment') FROM results"
_JOBS = "SELECT number, id, request, task, left FROM jobs"
_RESULTS = "SELECT number, job, member, attempt, stop_reason, entry FROM results"


def _job(row: tuple[int, str, bytes, bytes, int]) -> Job:
    number, job_id, request, task, members_left = row
    decoded = msgspec.json.decode(request, type=RolloutRequest)
    return Job(number, job_id, decoded, msgspec.json.decode(task, type=Task), members_left)


def _result(row: tuple[int, int, TrajectoryId, int, str, bytes | None]) -> Result:
    number, job, member, attempt, stop_reason, blob = row
    entry = msgspec.json.decode(blob, type=StoredAttempt) if blob is not None else None
    return Result(number, job, member, attempt, stop_reason, entry)
