"""Results of an earlier life are never deleted or trained over because a file beside
them is missing, cut or changed.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.record.journal import JOURNAL, SNAPSHOT, Replay, RunJournal
from rollweave.record.rundir import RunDir, read_identity, write_identity
from rollweave.record.store import TrajectoryStore
from rollweave.runtime.processes import Processes
from rollweave.runtime.recover import lost, rebuild, recover
from rollweave.runtime.supervisors.trainer_link import TrainerBackend
from rollweave.schema import commands as c
from rollweave.schema.config.loading import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, CorruptJournalError
from tests.support import fake_runs


def content(directory: Path) -> dict[str, bytes]:
    """Return every file of a run except for the controller's own marks."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def missing(journal: Path) -> None:
    journal.unlink()


def empty(journal: Path) -> None:
    journal.write_bytes(b"")


def header_only(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:12])


def unwritten(journal: Path) -> None:
    journal.write_bytes(b"\0" * 4096)


@pytest.mark.variants
@pytest.mark.parametrize("lose", [missing, empty, header_only, unwritten])
def test_a_run_whose_journal_is_lost_does_not_start_afresh(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    config = fake_runs.make_config(tmp_path, steps=2)
    fake_runs.run(config)
    lose(fake_runs.run_dir(config) / "journal.bin")
    before = content(fake_runs.run_dir(config))
    with pytest.raises(
        ConfigError,
        match=r"^--resume: .*/run holds steps 1, 2 of its checkpoints, [\d,]+ bytes of "
        r"trajectories, metrics.jsonl of trained steps, summary.json, but journal.bin (is "
        r"missing|has no complete record): .* nothing was changed; .* --fresh`",
    ):
        fake_runs.run(config, resume=True)
    assert content(fake_runs.run_dir(config)) == before


def test_a_run_without_events_starts_afresh(tmp_path: Path) -> None:
    config = fake_runs.make_config(tmp_path, steps=2)
    with RunDir.claim(config, resume=False) as directory:
        directory.write_config(config)
        directory.journal.touch()
    assert fake_runs.run(config, resume=True).steps == 2


def test_the_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    config, other = (
        fake_runs.make_config(tmp_path, steps=2),
        fake_runs.make_config(tmp_path / "other", steps=2),
    )
    fake_runs.run(config)
    fake_runs.run(other)
    shutil.copy(fake_runs.run_dir(other) / "journal.bin", fake_runs.run_dir(config) / "journal.bin")
    before = content(fake_runs.run_dir(config))
    with pytest.raises(
        ConfigError,
        match=r"journal.bin must be the journal of run \w{32}, as run.json says, got that of",
    ):
        fake_runs.run(config, resume=True)
    assert content(fake_runs.run_dir(config)) == before


def test_a_run_without_its_identity_resumes_and_gets_it_back(tmp_path: Path) -> None:
    config = fake_runs.make_config(tmp_path, steps=2)
    fake_runs.run(config)
    path = fake_runs.run_dir(config) / "run.json"
    before = read_identity(path)
    assert before is not None
    path.unlink()
    fake_runs.run(fake_runs.make_config(tmp_path, steps=3), resume=True)
    identity = read_identity(path)
    assert identity is not None
    assert (identity.id, identity.model) == (before.id, before.model)
    (warning,) = [
        line for line in fake_runs.lines(config, "warning") if "run.json" in line["message"]
    ]
    assert warning["message"].startswith(
        "run.json is missing, so that journal and model were not checked"
    )
    path.write_text(json.dumps({"id": 7}))
    with pytest.raises(ConfigError, match=r"run.json must be readable and as the run wrote it"):
        fake_runs.run(fake_runs.make_config(tmp_path, steps=3), resume=True)


@pytest.mark.variants
@pytest.mark.parametrize("kind", ["service", "simulation"])
def test_a_service_or_simulation_is_not_resumed_as_training(tmp_path: Path, kind: str) -> None:
    config = fake_runs.make_config(tmp_path, steps=2)
    fake_runs.run(config)
    path = fake_runs.run_dir(config) / "run.json"
    identity = read_identity(path)
    assert identity is not None
    write_identity(path, msgspec.structs.replace(identity, kind=kind))
    with pytest.raises(ConfigError, match=f"run holds a {kind}, which"):
        fake_runs.run(config, resume=True)


@pytest.mark.variants
@pytest.mark.parametrize("change", ["tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_changed_model_file_is_named(tmp_path: Path, change: str) -> None:
    config = fake_runs.make_config(tmp_path, steps=2)
    (tmp_path / "model" / "config.json").write_text('{"rope_theta": 10000.0}')
    fake_runs.run(config)
    path = tmp_path / "model" / change
    data = path.read_bytes()
    path.write_bytes(data.replace(b"1", b"2", 1) if b"1" in data else data[:-1])
    with pytest.raises(
        ConfigError,
        match=rf"the model must stay as the run began with it: {path} has changed; bring .*",
    ):
        fake_runs.run(fake_runs.make_config(tmp_path, steps=3), resume=True)
    path.unlink()
    with pytest.raises(ConfigError, match=rf"{path} is missing"):
        fake_runs.run(fake_runs.make_config(tmp_path, steps=3), resume=True)
    path.write_bytes(data)
    (tmp_path / "model" / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"model.safetensors was not there"):
        fake_runs.run(fake_runs.make_config(tmp_path, steps=3), resume=True)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert fake_runs.run(fake_runs.make_config(tmp_path, steps=3), resume=True).steps == 3


def boundaries(journal: Path) -> list[int]:
    """Return the ends of all records."""
    return [record.end for record in JOURNAL.scan(journal)]


@pytest.mark.extended
def test_a_cut_journal_is_refused_or_resumes_from_an_existing_checkpoint(tmp_path: Path) -> None:
    """The slow reference replays the whole journal, and records after each event which
    checkpoints were ever requested.
    """
    config = fake_runs.make_config(tmp_path, steps=4, run={"checkpoint_every": 2})
    fake_runs.fault(config, "kill-controller-3")
    fake_runs.killed(config)
    directory = RunDir(fake_runs.run_dir(config))
    content, there = directory.journal.read_bytes(), {0, 2}
    assert there == {
        int(path.name.removeprefix("step-")) for path in directory.checkpoints.iterdir()
    }
    needed: list[set[int]] = [set()]
    for _, _, commands in Replay(directory.journal, config):
        needed.append(
            needed[-1] | {one.step for one in commands if isinstance(one, c.SaveCheckpoint)}
        )
    outcomes = set()
    for number, end in enumerate(boundaries(directory.journal), start=1):
        directory.journal.write_bytes(content[:end])
        if there - needed[number]:
            with pytest.raises(ConfigError, match=r"the journal has lost its end; .* --fresh`"):
                rebuild(config, directory)
            outcomes.add("named")
        else:
            beginning = rebuild(config, directory)
            assert beginning.core.state.checkpoints.newest in (None, *there), (
                f"cut behind record {number}"
            )
            assert lost(beginning).step in there
            outcomes.add("resumed")
        assert directory.journal.read_bytes() == content[:end]
    assert outcomes == {"named", "resumed"}
    directory.journal.write_bytes(content)
    assert fake_runs.run(config, resume=True).steps == 4
    fake_runs.assert_trained_once(config)


def test_the_journal_is_synced_before_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss must not leave a checkpoint that the journal did not request:
    resuming would be refused.
    """
    config = fake_runs.make_config(tmp_path, steps=2)
    sync, synced_files = RunJournal.sync, set[str]()

    def watched(journal: RunJournal) -> None:
        sync(journal)
        synced_files.update(
            f"step-{one.step:06d}"
            for _, _, commands in Replay(RunDir(fake_runs.run_dir(config)).journal, config)
            for one in commands
            if isinstance(one, c.SaveCheckpoint)
        )
        written = {path.name[:11] for path in (fake_runs.run_dir(config) / "checkpoints").iterdir()}
        assert written <= synced_files
        synced.append(len(synced_files))

    synced: list[int] = []
    monkeypatch.setattr(RunJournal, "sync", watched)
    fake_runs.run(config)
    # at the start, and before and after each save; one may be requested while another
    # is written
    assert (synced[:2], synced[-1], len(synced)) == ([0, 1], 3, 7), synced


@pytest.mark.variants
@pytest.mark.parametrize("resume", [False, True])
def test_an_epoch_of_the_trainer_is_on_the_disk_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, resume: bool
) -> None:
    """Otherwise a power loss could make a resumed run count it again."""
    config = fake_runs.make_config(tmp_path, steps=3)
    if resume:
        fake_runs.fault(config, "kill-controller-1")
        fake_runs.killed(config)
    fake_runs.fault(config, "kill-trainer-2")
    journal, on_disk, named = RunDir(fake_runs.run_dir(config)).journal, [0], [False]
    fsync, trainer = os.fsync, Processes.trainer
    began: list[int] = []

    def synced(fd: int) -> None:
        fsync(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path in (journal, journal.with_name("journal.bin.new")):
            on_disk[0] = os.fstat(fd).st_size
        named[0] |= path == journal.parent and on_disk[0] > 0

    def begin(processes: Processes, epoch: int, *rest: Any) -> TrainerBackend:
        copy = tmp_path / "on-disk.bin"
        copy.write_bytes(journal.read_bytes()[: on_disk[0]])
        assert named[0]
        assert Replay(copy, config).finish().state.trainer.epoch == epoch
        began.append(epoch)
        return trainer(processes, epoch, *rest)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Processes, "trainer", begin)
    assert fake_runs.run(config, resume=resume).steps == 3
    assert began == ([1, 2] if resume else [0, 1])


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    config = fake_runs.make_config(tmp_path, steps=2)
    fake_runs.run(config)
    shutil.rmtree(fake_runs.run_dir(config) / "checkpoints")
    with pytest.raises(
        ConfigError,
        match=r"checkpoints must hold step 2, where journal.bin resumes, found no checkpoint; ",
    ):
        fake_runs.run(fake_runs.make_config(tmp_path, steps=3), resume=True)


def test_a_journal_without_its_snapshot_is_named(tmp_path: Path) -> None:
    config = fake_runs.make_config(tmp_path, steps=2)
    fake_runs.run(config)
    journal = fake_runs.run_dir(config) / "journal.bin"
    events = list(JOURNAL.scan(journal))[1:]
    data = JOURNAL.header
    for record in events:
        data += JOURNAL.record(record.kind, record.payload, len(data))
    journal.write_bytes(data)
    with pytest.raises(
        CorruptJournalError,
        match=r"must begin with a snapshot or RunStarted, got \w+: its beginning is lost",
    ):
        fake_runs.run(config, resume=True)
    journal.write_bytes(JOURNAL.header + JOURNAL.record(SNAPSHOT, b"?", len(JOURNAL.header)))
    with pytest.raises(CorruptJournalError, match="its snapshot does not decode"):
        fake_runs.run(config, resume=True)


def test_a_damaged_segment_put_aside_loses_only_its_trajectories(tmp_path: Path) -> None:
    config = fake_runs.make_config(tmp_path, steps=4)
    fake_runs.fault(config, "kill-controller-2")
    fake_runs.killed(config)
    segment = fake_runs.run_dir(config) / "trajectories" / "000000.bin"
    data = bytearray(segment.read_bytes())
    data[0] ^= 1  # in the magic of the newest segment
    segment.write_bytes(data)
    with pytest.raises(
        CorruptJournalError,
        match=rf"{segment}: is not a segment of trajectories .* `mv .*\.damaged`",
    ):
        fake_runs.run(config, resume=True)
    assert segment.read_bytes() == data
    segment.rename(f"{segment}.damaged")
    summary = fake_runs.run(config, resume=True)
    assert (summary.error, summary.steps, summary.account.balanced) == ("", 4, True)
    assert Path(f"{segment}.damaged").read_bytes() == data


def warnings(config: RunConfig) -> dict[str, str]:
    return {line["component"]: line["message"] for line in fake_runs.lines(config, "warning")}


def test_a_missing_segment_is_named_and_its_trajectories_counted(tmp_path: Path) -> None:
    config = fake_runs.make_config(tmp_path, steps=4)
    fake_runs.fault(config, "kill-controller-2")
    fake_runs.killed(config)
    (fake_runs.run_dir(config) / "trajectories" / "000000.bin").unlink()
    directory = RunDir(fake_runs.run_dir(config))
    with TrajectoryStore(directory.trajectories) as store:
        beginning = recover(config, directory, store)
    assert beginning.missing
    loss = lost(beginning)
    assert (
        f"{loss.trajectories} rollouts in flight, {len(beginning.missing)} stored trajector"
        in loss.describe()
    )
    assert loss.trajectories == lost(rebuild(config, directory)).trajectories
    (doubt,) = beginning.doubts
    assert doubt.message.startswith(
        f"{len(beginning.missing)} stored trajectories are not in {directory.trajectories} (missing "
    )
    assert "000000.bin)" in doubt.message


@pytest.mark.variants
@pytest.mark.parametrize("content", [None, b"\xff\x00garbage\n" * 9, b"\x07"])
def test_missing_metrics_are_named(tmp_path: Path, content: bytes | None) -> None:
    config = fake_runs.make_config(tmp_path, steps=2)
    fake_runs.run(config)
    path = fake_runs.run_dir(config) / "metrics.jsonl"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    (doubt,) = rebuild(config, RunDir(fake_runs.run_dir(config))).doubts
    assert (
        doubt.message
        == "metrics.jsonl has no readable line of 2 trained steps from 0 to 1: the report lacks "
        "them"
    )


def test_an_edited_configuration_is_reported_with_its_former_values(tmp_path: Path) -> None:
    config = fake_runs.make_config(tmp_path, steps=2)
    fake_runs.run(config)
    directory = RunDir(fake_runs.run_dir(config))
    assert rebuild(config, directory).doubts == ()
    edited = fake_runs.make_config(tmp_path, steps=2, trainer={"lr": 0.5})
    directory.write_config(edited)
    beginning = rebuild(edited, directory)
    assert beginning.changes == ("trainer.lr: 1e-05 → 0.5",)
    assert [one.message for one in beginning.doubts] == [
        "config.toml has changed since the run wrote it: trainer.lr: 1e-05 → 0.5"
    ]
    assert beginning.differing == 0
    fake_runs.run(fake_runs.make_config(tmp_path, steps=3, trainer={"lr": 0.5}), resume=True)
    assert "config.toml has changed" in warnings(config)["config"]
    assert rebuild(load(directory.config), directory).doubts == ()


def test_a_torn_record_is_cut_off_with_a_warning(tmp_path: Path) -> None:
    config = fake_runs.make_config(tmp_path, steps=4)
    fake_runs.fault(config, "kill-controller-2")
    fake_runs.killed(config)
    for name in ("journal.bin", "trajectories/000000.bin"):
        with (fake_runs.run_dir(config) / name).open("ab") as file:
            file.write(b"\x05\0\0")
    assert fake_runs.run(config, resume=True).steps == 4
    messages = {line["component"]: line["message"] for line in fake_runs.lines(config, "warning")}
    for name in ("journal", "trajectories"):
        assert (
            messages[name]
            == "3 bytes of an incomplete last record were cut off: its writer was killed"
        )
