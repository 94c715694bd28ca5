"""The index has what the store has, while it grows, and whatever happens to it."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.record.record_file import HEAD
from rollweave.record.store import Ended, TrajectoryReader, TrajectoryStore
from rollweave.schema.base import TrajectoryId
from rollweave.schema.errors import CorruptJournalError
from rollweave_ui.attempts import AttemptIndex, Query
from tests.support.synthetic_run import write_run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "made-up", steps=6).trajectories


def copied(store: Path, directory: Path) -> Path:
    return Path(shutil.copytree(store, directory / "trajectories"))


def agrees(index: AttemptIndex, directory: Path) -> bool:
    """Compare the index with a reader that loads every trajectory."""
    reader = TrajectoryReader(directory)
    for row, entry in zip(index.rows, reader.entries, strict=True):
        loaded = reader.load(entry)
        written = row.as_object()
        spans = [one.versions() for one in loaded.sequences if one.versions() != (-1, -1)]
        assert row.stored == entry
        assert written == {
            "id": loaded.id,
            "attempt": loaded.attempt,
            "purpose": entry.purpose,
            "at": round(entry.at, 2),
            "domain": loaded.task.tag,
            "task": loaded.task.id,
            "initiated": loaded.initiated_version,
            "versions": [min(low for low, _ in spans), max(high for _, high in spans)],
            "turns": sum(len(sequence.turns) for sequence in loaded.sequences),
            "tokens": sum(len(sequence.tokens) for sequence in loaded.sequences),
            "reward": loaded.reward,
            "success": loaded.success if entry.score is not None else None,
            "stop": loaded.stop_reason,
        }
        assert index.load(row) == loaded
    return True


def test_the_index_has_what_the_store_has_at_any_length(store: Path, tmp_path: Path) -> None:
    """Records appear in pieces, as a reader may see them while they are written."""
    (segment,) = store.glob("*.bin")
    content = segment.read_bytes()
    directory = tmp_path / "growing"
    directory.mkdir()
    index, growing = AttemptIndex(directory), directory / segment.name
    for end in [*range(0, len(content), 997), len(content)]:
        growing.write_bytes(content[:end])
        assert index.advance(10.0)
        assert agrees(index, directory)
    assert len(index.rows) == 6 * 16
    assert index.damaged == {}


def test_damage_is_one_line_and_the_rest_stays(store: Path, tmp_path: Path) -> None:
    directory = copied(store, tmp_path)
    (segment,) = directory.glob("*.bin")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2 + HEAD.size] ^= 1
    segment.write_bytes(content)
    index = AttemptIndex(directory)
    assert index.advance(10.0)
    assert 0 < len(index.rows) < 96
    (line,) = index.damaged.values()
    assert "record at byte" in line
    assert "\n" not in line
    assert index.load(index.rows[0]).id == "g0.0"


def test_another_store_in_the_same_place_is_read_anew(store: Path, tmp_path: Path) -> None:
    directory = copied(store, tmp_path)
    index = AttemptIndex(directory)
    index.advance(10.0)
    row = index.rows[0]
    shutil.rmtree(directory)
    with pytest.raises(CorruptJournalError, match="was deleted"):
        index.load(row)
    assert index.advance(10.0)
    assert index.rows == []
    write_run(tmp_path / "another", steps=2).trajectories.rename(directory)
    assert index.advance(10.0)
    assert agrees(index, directory)
    assert len(index.rows) == 32


def test_later_scores_and_attempts_are_taken(store: Path, tmp_path: Path) -> None:
    directory = copied(store, tmp_path)
    index = AttemptIndex(directory)
    index.advance(10.0)
    name = TrajectoryId("g0.0")
    with TrajectoryStore(directory) as writer:
        score = writer.score_of(name)
        assert score is not None
        writer.rescore([msgspec.structs.replace(score, reward=0.125)])
        (again,) = writer.get([name])
        again = msgspec.structs.replace(again, attempt=1, reward=None)
        row = index.rows[0].stored
        writer.append(Ended(at=99.0, purpose=row.purpose, member=0, trajectory=again))
    assert index.advance(10.0)
    assert agrees(index, directory)
    first, second = index.find(name, 0), index.find(name, None)
    assert first is not None
    assert first.as_object()["reward"] == 0.125
    assert second is not None
    assert (second.stored.attempt, second.as_object()["reward"]) == (1, None)


def test_a_little_time_reads_a_part_of_several_segments(store: Path, tmp_path: Path) -> None:
    directory = tmp_path / "small"
    reader = TrajectoryReader(store)
    with TrajectoryStore(directory, segment_bytes=3000) as writer:
        for entry in reader.entries:
            trajectory = reader.load(entry)
            writer.append(Ended(at=1.0, purpose=entry.purpose, member=0, trajectory=trajectory))
    assert len(list(directory.glob("*.bin"))) > 3
    index, calls = AttemptIndex(directory), 1
    while not index.advance(0.0):
        calls += 1
        assert len(index.rows) < len(reader.entries)
    assert calls == len(list(directory.glob("*.bin")))
    assert len(index.rows) == len(reader.entries)


@pytest.mark.parametrize(
    ("query", "admits"),
    [
        (Query(domain="calculator"), lambda row: row["domain"] == "calculator"),
        (Query(stop="max_turns"), lambda row: row["stop"] == "max_turns"),
        (Query(purpose="eval"), lambda row: False),
        (Query(text="g1."), lambda row: row["id"].startswith("g1.")),
        (Query(version=2), lambda row: row["initiated"] == 2),
        (Query(least=0.5), lambda row: row["reward"] >= 0.5),
        (Query(most=0.5), lambda row: row["reward"] <= 0.5),
    ],
)
def test_conditions_narrow_a_page(store: Path, query: Query, admits: object) -> None:
    assert callable(admits)
    index = AttemptIndex(store)
    index.advance(10.0)
    page = index.page(query, order="newest", offset=0, limit=1000)
    all_rows = index.page(Query(), order="newest", offset=0, limit=1000)["rows"]
    assert len(all_rows) == 96
    assert page["rows"] == [row for row in all_rows if admits(row)]
    assert page["matching"] == len(page["rows"]) < page["total"] == 96
    part = index.page(query, order="newest", offset=3, limit=2)["rows"]
    assert part == page["rows"][3:5]


def test_all_conditions_must_hold(store: Path) -> None:
    index = AttemptIndex(store)
    index.advance(10.0)
    row = next(row for row in index.rows if row.reward == 1.0)
    same = {
        "domain": row.domain,
        "stop": row.stop_reason,
        "purpose": "train",
        "text": row.task,
        "least": 1.0,
        "most": 1.0,
        "version": row.initiated,
    }
    assert Query(**same).admits(row)
    others = {"domain": "x", "stop": "x", "purpose": "eval", "text": "x"}
    for change in (*others.items(), ("least", 1.5), ("most", 0.5), ("version", 99)):
        assert not Query(**same | dict([change])).admits(row), change
    row.stored.score = None
    assert Query().admits(row)
    assert not Query(least=-9.0).admits(row)
    assert not Query(most=9.0).admits(row)


@pytest.mark.parametrize(
    ("order", "key"),
    [
        ("newest", lambda row: -row["at"]),
        ("oldest", lambda row: row["at"]),
        ("best", lambda row: -1.0 if row["reward"] is None else row["reward"]),
        ("worst", lambda row: 2.0 if row["reward"] is None else row["reward"]),
    ],
)
def test_attempts_are_listed_in_their_order(store: Path, order: str, key: Any) -> None:
    index = AttemptIndex(store)
    index.advance(10.0)
    index.rows[7].stored.score = None
    rows = index.page(Query(), order=order, offset=0, limit=1000)["rows"]
    keys = [key(row) for row in rows]
    assert keys == sorted(keys, reverse=order == "best")
    assert len(set(keys)) > 1


def test_attempts_of_other_lengths_tasks_and_tags(store: Path, tmp_path: Path) -> None:
    """A task without a tag is of the domain of its environment."""
    reader, directory = TrajectoryReader(store), tmp_path / "odd"
    first = reader.load(reader.entries[0])
    task = msgspec.structs.replace(first.task, env="lake", tag="", id=first.task.id)
    (sequence,) = first.sequences
    empty = msgspec.structs.replace(sequence, tokens=(), segments=(), logprobs=(), turns=())
    changes: list[dict[str, Any]] = [
        {"id": TrajectoryId("g1.0"), "task": task, "sequences": ()},
        {"id": TrajectoryId("g1.1"), "sequences": (sequence, empty, sequence)},
        {"id": TrajectoryId("g2.0"), "initiated_version": 5},
    ]
    with TrajectoryStore(directory) as writer:
        for at, change in enumerate(changes):
            trajectory = msgspec.structs.replace(first, reward=None, **change)
            purpose = reader.entries[0].purpose
            writer.append(Ended(at=5.0 - at, purpose=purpose, member=0, trajectory=trajectory))
    index = AttemptIndex(directory)
    assert index.advance(10.0)
    bare, double, later = index.rows
    assert (bare.domain, bare.tokens, bare.turns, bare.versions) == ("lake", 0, 0, (-1, -1))
    assert (double.domain, double.turns) == (first.task.tag, 2 * len(sequence.turns))
    assert double.tokens == 2 * len(sequence.tokens)
    assert index.domains() == sorted({"lake", first.task.tag})
    assert index.of_task(later) == [double, later], "by weights, not by time"
    assert index.of_task(bare) == [bare]
    assert index.beside(bare) == [bare, double]
    longest = index.page(Query(), order="longest", offset=0, limit=2)["rows"]
    assert [row["id"] for row in longest] == ["g1.1", "g2.0"]
    most_turns = index.page(Query(), order="turns", offset=2, limit=2)["rows"]
    assert [row["id"] for row in most_turns] == ["g1.0"]


@pytest.mark.parametrize("how", ["shorter", "another", "deleted"])
def test_a_segment_that_is_cut_or_replaced_is_read_anew(
    store: Path, tmp_path: Path, how: str
) -> None:
    directory = copied(store, tmp_path)
    (segment,) = directory.glob("*.bin")
    content, index = segment.read_bytes(), AttemptIndex(directory)
    index.advance(10.0)
    if how == "shorter":
        segment.write_bytes(content[: len(content) // 2])
    elif how == "another":
        (directory / "new").write_bytes(content)
        (directory / "new").rename(segment)
    else:
        segment.unlink()
    assert index.advance(10.0)
    assert agrees(index, directory)
    assert bool(index.rows) == (how != "deleted")


def test_what_is_no_segment_is_one_line(store: Path, tmp_path: Path) -> None:
    directory = copied(store, tmp_path)
    (segment,) = directory.glob("*.bin")
    number = int(segment.stem)
    for at, make in enumerate((Path.mkdir, lambda path: path.symlink_to("nowhere")), number + 1):
        make(segment.with_stem(f"{at:06}"))
    index = AttemptIndex(directory)
    assert index.advance(10.0)
    assert len(index.rows) == 96
    assert index.damaged.keys() == {number + 1, number + 2}
    assert all("must be a file, got a " in line for line in index.damaged.values())
