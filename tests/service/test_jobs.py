"""The job database: stored and deleted rows, their numbers, a failing disk, and access
by another program.
"""

import sqlite3
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.record.store import StoredAttempt
from rollweave.schema.base import TaskId, TrajectoryId
from rollweave.schema.errors import ConfigError, DiskError
from rollweave.schema.service import RolloutRequest
from rollweave.schema.work import Purpose, Task
from rollweave.service.jobs import Job, JobStore

PLENTY = 1 << 30
TASK = Task(id=TaskId("t"), env="game", seed=0, payload="", tag="game")


def add(jobs: JobStore, members: list[int]) -> list[Job]:
    requests = [
        RolloutRequest(handler="game", id=f"j{i}", index=i, members=count)
        for i, count in enumerate(members)
    ]
    added = jobs.add([(request.id, request, TASK) for request in requests], max_bytes=PLENTY)
    assert added is not None
    return added


def size(job: Job) -> int:
    return len(msgspec.json.encode(job.request)) + len(msgspec.json.encode(job.task))


@given(
    members=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    keep=st.integers(1, 5),
    order=st.randoms(use_true_random=False),
    again=st.lists(st.integers(0, 23), max_size=6),
)
def test_keeps_a_job_until_none_of_its_results_is_among_the_newest(
    members: list[int], keep: int, order: object, again: list[int]
) -> None:
    jobs = JobStore(Path(":memory:"))
    added = add(jobs, members)
    names = [
        TrajectoryId(f"{job.group_id}.{number}")
        for job in added
        for number in range(job.members_left)
    ]
    order.shuffle(names)  # type: ignore[attr-defined]
    recorded: list[str] = []
    for place in again:  # results that are delivered twice, at any time
        names.insert(place, names[place % len(names)])
    for name in names:
        result = jobs.record_result(name, 0, "finished", None, keep=keep)
        assert (result is None) == (name in recorded), (
            "recorded once, also after its job was deleted"
        )
        if result is not None:
            recorded.append(name)
            assert result.number == len(recorded), "no gap, no repeat"
        for job, count in zip(added, members, strict=True):
            done = [one for one in recorded if one.startswith(f"{job.group_id}.")]
            stored = jobs.find(job.id)
            is_kept = len(done) < count or any(one in recorded[-keep:] for one in done)
            assert (stored is not None) == is_kept
            assert {stored_result.member for stored_result in jobs.results_of(job.number)} == (
                set(done) if is_kept else set()
            )
            if stored is not None:
                assert stored.members_left == count - len(done)
        waits = {one.id for one in jobs.unfinished_jobs()}
        assert jobs.unfinished_bytes == sum(size(job) for job in added if job.id in waits)
    assert all(
        jobs.id_of(stored_result.job) is not None for stored_result in jobs.results_after(0, 1000)
    )
    jobs.close()


def test_bounds_unfinished_bytes_and_counts_them_again_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    jobs = JobStore(path)
    added = add(jobs, [1, 2])
    both = size(added[0]) + size(added[1])
    more = RolloutRequest(handler="game", id="more", index=9)
    needed = both + len(msgspec.json.encode(more)) + len(msgspec.json.encode(TASK))
    assert jobs.add([("more", more, TASK)], max_bytes=needed - 1) is None
    assert (jobs.find("more"), jobs.unfinished_bytes) == (None, both)
    jobs.record_result(TrajectoryId("r2.0"), 0, "finished", None, keep=9)
    jobs.close()
    jobs = JobStore(path)
    assert jobs.unfinished_bytes == both
    jobs.record_result(TrajectoryId("r2.1"), 0, "finished", None, keep=9)
    assert jobs.unfinished_bytes == size(added[0])
    assert jobs.add([("more", more, TASK)], max_bytes=needed - 1) is not None
    jobs.close()


@given(places=st.lists(st.none() | st.integers(0, 5), max_size=30), keep=st.integers(1, 8))
def test_lists_the_segments_that_hold_results(places: list[int | None], keep: int) -> None:
    jobs = JobStore(Path(":memory:"))
    for job, place in zip(add(jobs, [1] * len(places)), places, strict=True):
        name = TrajectoryId(f"{job.group_id}.0")
        entry = (
            StoredAttempt(name, 0, Purpose.SERVE, 0, 0.0, place, 8, 100)
            if place is not None
            else None
        )
        jobs.record_result(name, 0, "finished", entry, keep=keep)
    assert jobs.segments() == {place for place in places[-keep:] if place is not None}
    jobs.close()


def test_last_job_number_outlives_its_job() -> None:
    jobs = JobStore(Path(":memory:"))
    assert jobs.last_job_number() == 0
    for job in add(jobs, [1, 1, 1]):
        jobs.record_result(TrajectoryId(f"{job.group_id}.0"), 0, "finished", None, keep=1)
    assert jobs.last_job_number() == 3
    jobs.close()


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
    jobs._db.execute("PRAGMA max_page_count = 100000")
    jobs.add([("large", large, TASK)], max_bytes=PLENTY)
    assert [job.id for job in jobs.unfinished_jobs()] == ["j0", "large"]
    jobs.close()


def test_refuses_a_file_that_is_damaged_or_in_use(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    path.write_bytes(b"not a database, and long enough to be looked at" * 100)
    with pytest.raises(ConfigError, match=r"jobs\.sqlite must be the job database of a service"):
        JobStore(path)
    path.unlink()
    jobs = JobStore(path)
    add(jobs, [1])
    other = sqlite3.connect(path, timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):  # it cannot block us
        other.execute("BEGIN IMMEDIATE")
    jobs.close()
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ConfigError, match="neither damaged nor in use"):
        JobStore(path)
    other.close()
