"""A journal cut at any byte opens as its complete records, damage before the tail is an
error, and rotation is atomic; it replays to the recorded decisions, also after
compaction, and detects differences.
"""

import dataclasses
import errno
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.io.disk import NEW_SUFFIX
from rollweave.record.journal import JOURNAL, RECORD, JournalReader, Replay, RunJournal, digest
from rollweave.record.record_file import HEAD, HEADER
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, packed
from rollweave.schema.commands import ResumeEngine, SetTimer
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import CorruptJournalError
from tests.support.properties import examples
from tests.support.variants import mostly_extended

Records = list[tuple[float, e.Event]]

COMMANDS = [SetTimer(at=1.0)]
"""Commands whose digest ends in no zero, as space that was never written does."""

events = st.one_of(
    st.just(e.TimerFired()),
    st.just(e.StopRequested()),
    st.builds(
        e.EngineSuspended, engine_id=st.text(max_size=4).map(EngineId), epoch=st.integers(0, 9)
    ),
    st.builds(
        e.EngineLost, engine_id=st.just(EngineId("e")), epoch=st.just(1), error=st.text(max_size=30)
    ),
)
journals = st.lists(st.tuples(st.floats(0, 1e6), events), min_size=1, max_size=4)


def write(path: Path, records: Records, *, snapshot: bytes | None = None) -> list[int]:
    """Write a fresh journal; return the offset at which each record ends, starting with
    the header's.
    """
    path.unlink(missing_ok=True)
    with RunJournal(path) as writer:
        if snapshot is not None:
            writer.rotate(snapshot)
        ends = [writer.size]
        for now, event in records:
            writer.append(now, event, COMMANDS)
            ends.append(writer.size)
    return ends


def read(path: Path) -> Records:
    return [(now, entry.event) for now, entry in JournalReader(path)]


SAMPLE: Records = [
    (0.5, e.TimerFired()),
    (1.25, e.EngineLost(engine_id=EngineId("e0"), epoch=2, error="gone: é")),
    (2.0, e.StopRequested()),
]


@settings(max_examples=examples(40))
@given(journals)
def test_appended_records_are_read(
    tmp_path_factory: pytest.TempPathFactory, records: Records
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.bin"
    ends = write(path, records)
    assert read(path) == records
    assert path.stat().st_size == ends[-1]


@pytest.mark.parametrize(
    "snapshot", mostly_extended([None, b"", b"state of the core"], {None, b"state of the core"})
)
def test_journal_cut_at_any_byte_opens_as_its_complete_records(
    tmp_path: Path, snapshot: bytes | None
) -> None:
    path = tmp_path / "journal.bin"
    ends = write(path, SAMPLE, snapshot=snapshot)
    content = path.read_bytes()
    begin = HEADER.size if snapshot is None else ends[0]
    for cut in range(len(content) + 1):
        for filler in (b"", b"\0" * 40):  # a lost end, and one that was allocated but never written
            path.write_bytes(content[:cut] + filler)
            complete = sum(end <= cut for end in ends[1:])
            assert read(path) == SAMPLE[:complete]
            assert JournalReader(path).snapshot() == (snapshot if cut >= begin else None)
            with RunJournal(path) as writer:
                assert writer.size == (ends[complete] if cut >= begin else HEADER.size)
                writer.append(9.0, e.StopRequested(), COMMANDS)
            assert read(path) == [*SAMPLE[:complete], (9.0, e.StopRequested())]


def test_flipped_byte_is_reported_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    ends = write(path, SAMPLE, snapshot=b"snap")
    content = path.read_bytes()
    starts = [HEADER.size, *ends[:-1]]
    for position in range(len(content)):
        for flip in (0x01, 0x10, 0x80):
            damaged = bytearray(content)
            damaged[position] ^= flip
            path.write_bytes(damaged)
            padding = any(start + 5 <= position < start + 8 for start in starts)
            if padding:
                assert read(path) == SAMPLE
                continue
            with pytest.raises(CorruptJournalError) as caught:
                read(path)
            if position >= HEADER.size:
                at = max(start for start in starts if start <= position)
                assert f"record at byte {at} " in str(caught.value)
                assert f"`truncate -s {at} {path}`" in str(caught.value)
            with pytest.raises(CorruptJournalError):
                RunJournal(path)
            assert path.read_bytes() == damaged


def test_writer_reports_the_torn_bytes(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    ends = write(path, SAMPLE)
    path.write_bytes(path.read_bytes()[:-3])
    with RunJournal(path) as writer:
        assert (writer.torn, writer.size) == (ends[-1] - 3 - ends[-2], ends[-2])
    with RunJournal(path) as writer:
        assert writer.torn == 0


def test_swapped_records_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    first, second, third, fourth = write(path, SAMPLE)
    content = path.read_bytes()
    path.write_bytes(
        content[:first] + content[second:third] + content[first:second] + content[third:fourth]
    )
    with pytest.raises(CorruptJournalError, match=f"at byte {first} is damaged"):
        read(path)


def test_another_schema_version_or_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    version = JOURNAL.version
    path.write_bytes(dataclasses.replace(JOURNAL, version=version + 1).header)
    with pytest.raises(CorruptJournalError, match=f"must be {version}, got {version + 1}"):
        read(path)
    path.write_bytes(b"[run]\nname = 'a'\n")
    with pytest.raises(CorruptJournalError, match="is not a journal"):
        RunJournal(path)


def test_record_of_another_type_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    *_, offset = write(path, SAMPLE)
    with path.open("ab") as file:
        file.write(JOURNAL.record(RECORD, packed((0.0, {"type": "Unheard"})), offset))
    with pytest.raises(CorruptJournalError, match=f"at byte {offset} does not decode"):
        read(path)


def test_rotate_starts_from_the_snapshot_under_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    with RunJournal(path) as writer:
        for now, event in SAMPLE:
            writer.append(now, event, COMMANDS)
        writer.rotate(b"first")
        writer.append(3.0, e.TimerFired(), COMMANDS)
        writer.rotate(b"second")
        writer.append(4.0, e.StopRequested(), COMMANDS)
        writer.sync()
        assert writer.size == path.stat().st_size
    assert JournalReader(path).snapshot() == b"second"
    assert read(path) == [(4.0, e.StopRequested())]
    assert os.listdir(tmp_path) == ["journal.bin"]


def test_a_failed_rotation_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    with RunJournal(path) as writer:
        writer.append(*SAMPLE[0], COMMANDS)
        (tmp_path / f"journal.bin{NEW_SUFFIX}").mkdir()  # no file can be opened there
        with pytest.raises(OSError, match="directory"):
            writer.rotate(b"snapshot")
        writer.append(*SAMPLE[1], COMMANDS)
    assert JournalReader(path).snapshot() is None
    assert read(path) == SAMPLE[:2]


def test_full_disk_leaves_complete_records(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunJournal(path) as writer:
        writer.append(*SAMPLE[0], COMMANDS)
        before = writer.size
        resource.setrlimit(resource.RLIMIT_FSIZE, (before + HEAD.size + 3, hard))
        try:
            with pytest.raises(OSError) as caught:  # noqa: PT011 (its number is checked below)
                writer.append(*SAMPLE[1], COMMANDS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG
        assert (writer.size, path.stat().st_size) == (before, before)
        writer.append(*SAMPLE[2], COMMANDS)
    assert read(path) == [SAMPLE[0], SAMPLE[2]]


# Replays.

CONFIG = RunConfig.model_validate(
    {
        "run": {"name": "r"},
        "model": {"path": "m"},
        "tasks": [{"env": "frozenlake"}],
        "rollout": {"groups_per_step": 2},
    }
)
EVENTS: list[e.Event] = [
    e.RunStarted(engines=(e.EngineSlot(id=EngineId("e0")),)),
    e.EngineJoined(engine_id=EngineId("e0"), epoch=0, max_slots=4, kv_total_tokens=100),
    e.TrainerReady(epoch=0, step=0),
    e.TimerFired(),
    e.WeightsPublished(epoch=0, version=0, publication_id=0),
]


def live(path: Path, *, compact_after: int | None = None) -> Core:
    """Run the core as the pump does."""
    core = Core(CONFIG)
    with RunJournal(path) as journal:
        for number, event in enumerate(EVENTS):
            journal.append(float(number), event, core.handle(float(number), event))
            if number == compact_after:
                size = journal.size
                journal.rotate(core.snapshot())
                assert journal.size != size
    return core


def test_replay_reaches_the_state_of_the_run(tmp_path: Path) -> None:
    core = live(tmp_path / "journal.bin")
    replay = Replay(tmp_path / "journal.bin", CONFIG)
    handled = list(replay)
    assert [(now, event) for now, event, _ in handled] == [
        (float(number), event) for number, event in enumerate(EVENTS)
    ]
    assert SetTimer(at=1.0) in handled[0][2]
    assert (replay.events, replay.differing) == (len(EVENTS), 0)
    assert replay.core.snapshot() == core.snapshot()


def test_a_compacted_journal_replays_from_its_snapshot(tmp_path: Path) -> None:
    core = live(tmp_path / "journal.bin", compact_after=2)
    replay = Replay(tmp_path / "journal.bin", CONFIG)
    assert replay.finish().snapshot() == core.snapshot()
    assert (replay.events, replay.differing) == (len(EVENTS) - 3, 0)


def test_initial_and_appended_bytes(tmp_path: Path) -> None:
    core = live(tmp_path / "journal.bin")
    with RunJournal(tmp_path / "journal.bin") as journal:
        assert (journal.initial_bytes, journal.appended_bytes) == (journal.size, 0)
        journal.append(9.0, EVENTS[3], [])
        assert journal.appended_bytes == journal.size - journal.initial_bytes > 0
        journal.rotate(core.snapshot())
        assert (journal.initial_bytes, journal.appended_bytes) == (journal.size, 0)


def test_different_decisions_are_detected(tmp_path: Path) -> None:
    live(tmp_path / "journal.bin")
    changed = CONFIG.model_copy(update={"eval": CONFIG.eval.model_copy(update={"every": 1})})
    replay = Replay(tmp_path / "journal.bin", changed)
    replay.finish()
    assert replay.differing == 1  # what follows the first publication


def test_digests_distinguish_commands() -> None:
    some = [ResumeEngine(engine_id=EngineId("e0")), SetTimer(at=1.0)]
    assert digest(some) == digest(list(some))
    assert len({digest([]), digest(some), digest(some[::-1]), digest([SetTimer(at=2.0)])}) == 4
