"""The job database: stored and deleted rows, their numbers, a failing disk, and access
by another program.
"""

import contextlib
import copy
import dataclasses
import functools
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.record.store import StoredAttempt
from rollweave.schema.base import TaskId, TrajectoryId, as_json
from rollweave.schema.errors import ConfigError, DiskError
from rollweave.schema.work import Purpose, Task
from rollweave_service.jobs import Job, JobStore, Result
from rollweave_service.messages import RolloutRequest
from tests.support.properties import examples

PLENTY = 1 << 30
TASK = Task(id=TaskId("t"), env="game", seed=0, payload="", tag="game")


Request = tuple[str, RolloutRequest, Task]


def add(jobs: JobStore, members: list[int]) -> list[Job]:
    requests = [
        RolloutRequest(handler="game", id=f"j{i}", index=i, members=count)
        for i, count in enumerate(members)
    ]
    added = jobs.add([(request.id, request, TASK) for request in requests], max_bytes=PLENTY)
    assert added is not None
    return added


def size(job: Job) -> int:
    return len(as_json(job.request)) + len(as_json(job.task))


class Model:
    """The tables of a job database as lists."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.results: list[Result] = []
        self.engines: dict[str, bytes] = {}
        self.last_job = self.last_result = 0

    @property
    def unfinished(self) -> list[Job]:
        return [job for job in self.jobs if job.members_left]

    @property
    def bytes(self) -> int:
        return sum(map(size, self.unfinished))

    def add(self, requests: list[Request]) -> list[Job]:
        new = [
            Job(self.last_job + count, job_id, request, task, request.members)
            for count, (job_id, request, task) in enumerate(requests, 1)
        ]
        self.jobs += new
        self.last_job += len(new)
        return new

    def record(
        self, member: str, attempt: int, entry: StoredAttempt | None, keep: int
    ) -> Result | None:
        number = int(member[1:].split(".")[0])
        place = next((at for at, job in enumerate(self.jobs) if job.number == number), None)
        if place is None or any(result.member == member for result in self.results):
            return None
        left = self.jobs[place].members_left - 1
        self.jobs[place] = dataclasses.replace(self.jobs[place], members_left=left)
        self.last_result += 1
        name = TrajectoryId(member)
        result = Result(self.last_result, number, name, attempt, "finished", entry)
        self.results.append(result)
        newest = {one.job for one in self.results if one.number > self.last_result - keep}
        self.jobs = [job for job in self.jobs if job.members_left or job.number in newest]
        known = {job.number for job in self.jobs}
        self.results = [one for one in self.results if one.job in known]
        return dataclasses.replace(result, members_left=left)

    def members(self, *, new: bool) -> Iterator[str]:
        """Yield the members whose result is not known, or those of which it was."""
        known = {result.member for result in self.results}
        for number in range(1, self.last_job + 1):
            job = next((job for job in self.jobs if job.number == number), None)
            for member in range(job.request.members if job else 1):
                name = f"r{number}.{member}"
                if new == (job is not None and name not in known):
                    yield name

    def check(self, store: JobStore) -> None:
        """Compare what each method reads."""
        assert store.jobs_after(0, 99, unfinished=False) == self.jobs
        assert store.unfinished_jobs() == self.unfinished
        assert store.unfinished_bytes == self.bytes
        assert store.results_after(0, 99) == self.results
        assert dict(store.engines()) == self.engines
        assert store.last_job_number() == self.last_job
        assert store.last_result_number() == max((one.number for one in self.results), default=0)
        assert store.segments() == {one.entry.segment for one in self.results if one.entry}

    def check_pages(self, store: JobStore, number: int, after: int, limit: int) -> None:
        for unfinished in (True, False):
            jobs = self.unfinished if unfinished else self.jobs
            page = [job for job in jobs if job.number > after][:limit]
            assert store.jobs_after(after, limit, unfinished=unfinished) == page
        page_of = [one for one in self.results if one.number > after][:limit]
        assert store.results_after(after, limit) == page_of
        job = next((one for one in self.jobs if one.number == number), None)
        own = [one for one in self.results if one.job == number]
        assert store.id_of(number) == (job.id if job else None)
        assert store.find(job.id if job else "unknown") == job
        assert store.results_of(number) == own
        page_of = [one for one in own if one.number > after][:limit]
        assert store.results_after(after, limit, job=number) == page_of


class Killed:
    """Copies the files before one of the statements of a call: what a process leaves
    that is killed then.
    """

    def __init__(self, path: Path, copies: Path) -> None:
        self._path, self._copies = path, copies
        self._call = JobStore._execute
        self._left = -1

    def at(self, number: int) -> None:
        self._left = number
        for file in self._copies.iterdir():
            file.unlink()

    def execute(self, store: JobStore, statement: str, values: Any = ()) -> sqlite3.Cursor:
        if self._left == 0:
            for file in self._path.parent.glob("jobs.sqlite*"):
                shutil.copy(file, self._copies)
        self._left -= 1
        return self._call(store, statement, values)

    def check(self, before: Model, after: Model) -> None:
        """The call was made, or it was not."""
        if not (self._copies / "jobs.sqlite").exists():
            return
        with contextlib.closing(JobStore(self._copies / "jobs.sqlite")) as left:
            try:
                before.check(left)
            except AssertionError:
                after.check(left)


STEPS = {
    "add": 4,
    "full": 1,
    "known": 1,
    "record": 12,
    "again": 3,
    "restart": 2,
    "damage": 1,
    "engine": 3,
    "remove": 1,
    "erase": 1,
}
"""What happens, and how often."""


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 1 << 32), keep=st.integers(1, 5))
def test_the_database_has_what_its_lists_have(
    seed: int, keep: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also after a restart, after each error, and if the process is killed at any
    statement: what was answered is there, and each call was made as a whole or not.
    """
    rng = random.Random(seed)
    steps = rng.choices(list(STEPS), list(STEPS.values()), k=25)
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "copies").mkdir()
    path = folder / "jobs.sqlite"
    killed = Killed(path, folder / "copies")
    store, model, count = JobStore(path), Model(), 0

    def requests(sizes: list[int]) -> list[Request]:
        nonlocal count
        new = []
        for members in sizes:
            request = RolloutRequest(handler="game", id=f"j{count}", index=count, members=members)
            new.append((request.id, request, TASK))
            count += 1
        return new

    for step in steps:
        before = copy.deepcopy(model)
        killed.at(rng.randrange(14))
        engine = rng.choice(["e0", "e1"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JobStore, "_execute", lambda *given: killed.execute(*given))
            match step:
                case "add" | "full":
                    new = requests([rng.randint(1, 3) for _ in range(rng.randint(1, 3))])
                    needed = sum(len(as_json(part)) for _, *parts in new for part in parts)
                    limit = model.bytes + needed - (step == "full")
                    expected = model.add(new) if step == "add" else None
                    assert store.add(new, max_bytes=limit) == expected
                case "known" if model.jobs:  # none of them is stored then
                    new = requests([1, 1])
                    new[1] = (rng.choice(model.jobs).id, *new[1][1:])
                    with pytest.raises(DiskError, match="UNIQUE"):
                        store.add(new, max_bytes=PLENTY)
                case "record" | "again" if members := [*model.members(new=step == "record")]:
                    member, attempt = rng.choice(members), rng.randrange(3)
                    entry = StoredAttempt(
                        TrajectoryId("t"), 0, Purpose.SERVE, 0, 0.0, rng.randrange(4), 8, 100
                    )
                    given_entry = entry if attempt else None
                    result = store.record_result(
                        TrajectoryId(member), attempt, "finished", given_entry, keep=keep
                    )
                    assert result == model.record(member, attempt, given_entry, keep)
                case "engine":
                    model.engines[engine] = f"secret {rng.random()}".encode()
                    store.add_engine(engine, model.engines[engine])
                case "remove":
                    model.engines.pop(engine, None)
                    store.remove_engine(engine)
                case "erase":
                    erased = model.engines.pop(engine, b"never there")
                    store.erase_engine(engine)
                    files = folder.glob("jobs.sqlite*")
                    assert not [file for file in files if erased in file.read_bytes()]
                case "damage" if model.jobs:
                    bad = model.jobs.pop(rng.randrange(len(model.jobs)))
                    model.results = [each for each in model.results if each.job != bad.number]
                    store._db.execute("UPDATE jobs SET task = '{' WHERE number = ?", [bad.number])
                    store.close()
                    store = JobStore(path)
                    ((name, why),) = store.delete_unreadable()
                    assert (name, "truncated" in why) == (bad.id, True)
                case "restart":
                    store.close()
                    store = JobStore(path)
                    assert list(store.delete_unreadable()) == []
        model.check(store)
        number = rng.randint(max(0, model.last_job - 6), model.last_job + 1)
        model.check_pages(store, number, rng.randint(0, model.last_result), rng.randint(1, 4))
        if step != "damage":
            killed.check(before, model)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (1,), "of any safe file"
    store.close()


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    jobs = JobStore(tmp_path / "jobs.sqlite")
    add(jobs, [1])
    # like a full disk: the file must not grow
    jobs._db.execute("PRAGMA max_page_count = 1")
    large = RolloutRequest(handler="game", id="large", payload={"x": "x" * 100_000})
    for _ in range(2):
        with pytest.raises(DiskError, match="full"):
            jobs.add([("large", large, TASK)], max_bytes=PLENTY)
        assert jobs.find("large") is None
        assert jobs.unfinished_bytes == size(jobs.unfinished_jobs()[0])
    jobs._db.execute("PRAGMA max_page_count = 100000")
    jobs.add([("large", large, TASK)], max_bytes=PLENTY)
    assert [job.id for job in jobs.unfinished_jobs()] == ["j0", "large"]
    jobs.close()


def test_refuses_a_file_that_is_damaged_or_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, timeout=0))
    path = tmp_path / "jobs.sqlite"
    path.write_bytes(b"not a database, and long enough to be looked at" * 100)
    with pytest.raises(ConfigError, match=r"jobs\.sqlite must be the job database of a service"):
        JobStore(path)
    path.unlink()
    jobs = JobStore(path)
    add(jobs, [1])
    other = sqlite3.connect(path)
    with pytest.raises(sqlite3.OperationalError, match="locked"):  # it cannot block us
        other.execute("BEGIN IMMEDIATE")
    jobs.close()
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ConfigError, match="neither damaged nor in use"):
        JobStore(path)
    other.close()
