"""The journal of a run replays to the recorded decisions, also after compaction, and
detects differences.
"""

from pathlib import Path

from rollweave.core.core import Core
from rollweave.record.journal import Replay, RunJournal, digest
from rollweave.schema.base import EngineId
from rollweave.schema.commands import ResumeEngine, SetTimer
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import (
    EngineJoined,
    EngineSlot,
    Event,
    RunStarted,
    TimerFired,
    TrainerReady,
    WeightsPublished,
)

CONFIG = RunConfig.model_validate(
    {
        "run": {"name": "r"},
        "model": {"path": "m"},
        "tasks": [{"env": "frozenlake"}],
        "rollout": {"groups_per_step": 2},
    }
)
EVENTS: list[Event] = [
    RunStarted(engines=(EngineSlot(id=EngineId("e0")),)),
    EngineJoined(engine_id=EngineId("e0"), epoch=0, max_slots=4, kv_total_tokens=100),
    TrainerReady(epoch=0, step=0),
    TimerFired(),
    WeightsPublished(epoch=0, version=0, publication_id=0),
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
