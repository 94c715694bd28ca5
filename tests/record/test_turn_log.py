"""The turn log is a cache: what is whole in it is read, and nothing in it, or in its
directory, ends a run.
"""

import os
from pathlib import Path

import pytest

from rollweave.record.turn_log import (
    Attempt,
    TurnAnswer,
    TurnLog,
    TurnRecord,
    TurnTokens,
    context_digest,
)
from rollweave.schema.base import TrajectoryId
from rollweave.schema.errors import DiskError
from rollweave.schema.serving import (
    FinishReason,
    GenerateResult,
    Sampling,
    TokenDelta,
    VersionSpan,
)

CONTEXT = context_digest((1, 2, 3), Sampling())


def key(member: int, attempt: int = 0) -> Attempt:
    return TrajectoryId(f"g0.{member}"), attempt


def tokens(member: int, turn: int = 0, *, start: int = 0, count: int = 2) -> TurnTokens:
    end = start + count
    delta = TokenDelta(
        id="r",
        start=start,
        tokens=tuple(range(start, end)),
        logprobs=(-0.5,) * count,
        versions=(VersionSpan(start=start, end=end, version=3),),
    )
    return TurnTokens(
        trajectory_id=key(member)[0], attempt=0, turn=turn, context=CONTEXT, delta=delta
    )


def answer(member: int, turn: int = 0, *, attempt: int = 0) -> TurnAnswer:
    result = GenerateResult(
        id="r",
        tokens=(4, 5),
        logprobs=(-0.5, -0.25),
        versions=(VersionSpan(start=0, end=2, version=3),),
        finish=FinishReason.STOP,
    )
    return TurnAnswer(
        trajectory_id=key(member)[0], attempt=attempt, turn=turn, context=CONTEXT, result=result
    )


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def written(directory: Path, *records: TurnRecord) -> None:
    with TurnLog(directory) as log:
        for record in records:
            log.append(record)


def test_the_next_life_reads_what_was_written(tmp_path: Path) -> None:
    records = [tokens(0), answer(0), answer(1), tokens(0, 1), answer(0, attempt=1)]
    written(tmp_path / "turns", *records)
    with TurnLog(tmp_path / "turns") as log:
        assert log.recorded == {
            key(0): [records[0], records[1], records[3]],
            key(1): [records[2]],
            key(0, 1): [records[4]],
        }
        log.keep([key(1), key(7)])
        assert list(log.recorded) == [key(1)]
        assert log.take(key(1)) == [records[2]]
        assert log.take(key(0)) == []


def test_a_log_that_nobody_writes_leaves_no_directory(tmp_path: Path) -> None:
    with TurnLog(tmp_path / "turns") as log:
        log.keep([])
        log.forget(key(0))
    assert not (tmp_path / "turns").exists()


def test_a_log_of_finished_attempts_is_deleted(tmp_path: Path) -> None:
    with TurnLog(tmp_path / "turns") as log:
        log.append(answer(0))
        log.append(answer(1))
        log.forget(key(0))
        log.forget(key(1))
    assert not (tmp_path / "turns").exists()


def test_segments_of_former_lives_stay_until_nothing_can_continue(tmp_path: Path) -> None:
    written(tmp_path, answer(0), answer(1))
    with TurnLog(tmp_path) as log:
        log.keep([key(0), key(1)])
        log.append(answer(0, attempt=1))
        log.release(key(0)[0])
        assert segments(tmp_path) == ["000000.bin", "000001.bin"]
        log.release(key(1)[0])
        assert segments(tmp_path) == ["000001.bin"]
    with TurnLog(tmp_path) as log:
        assert list(log.recorded) == [key(0, 1)]
        log.keep([])
    assert not tmp_path.exists()


def test_segments_are_deleted_with_their_last_attempt(tmp_path: Path) -> None:
    with TurnLog(tmp_path, segment_bytes=1) as log:  # one record each
        for member in range(3):
            log.append(answer(member))
        assert len(segments(tmp_path)) == 3
        log.forget(key(1))
        log.append(answer(3))
        assert len(segments(tmp_path)) == 4, "an older attempt is under way"
        log.forget(key(0))
        log.append(answer(4))
        assert segments(tmp_path) == [f"{number:06d}.bin" for number in (2, 3, 4)]


@pytest.mark.parametrize("damage", ["cut", "zeros", "changed", "foreign"])
def test_damage_costs_records_and_is_named(tmp_path: Path, damage: str) -> None:
    written(tmp_path, answer(0), answer(1))
    path = tmp_path / "000000.bin"
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[:-3])
        case "zeros":
            path.write_bytes(data[:-3] + bytes(3))
        case "changed":
            path.write_bytes(data[:-3] + b"\xff" * 3)
        case "foreign":
            path.write_bytes(b"something else, of some length")
    with TurnLog(tmp_path) as log:
        assert list(log.recorded) == ([] if damage == "foreign" else [key(0)])
        assert len(log.damaged) == (damage in ("changed", "foreign"))
        assert all(str(path) in text for text in log.damaged)
        log.append(answer(2))  # into another segment
    with TurnLog(tmp_path) as log:
        assert key(2) in log.recorded


def test_a_full_disk_ends_the_log_once_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    errors = list[DiskError]()
    with TurnLog(tmp_path) as log:
        log.on_failure = errors.append
        log.append(answer(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            log.append(answer(1))
        log.append(answer(2))
    assert [str(tmp_path) in str(error) for error in errors] == [True]
    with TurnLog(tmp_path) as log:
        assert list(log.recorded) == [key(0)]


def test_contexts_have_different_digests() -> None:
    contexts = [(), (0,), (1,), (0, 1), (1, 0), (256,), (1, 2, 3)]
    digests = {context_digest(context, Sampling()) for context in contexts}
    assert len(digests) == len(contexts)


def test_other_settings_of_sampling_make_another_context() -> None:
    ways = [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(top_p=0.9),
        Sampling(top_k=5),
        Sampling(stop=("a",)),
        Sampling(stop_token_ids=(1,)),
        Sampling(allowed=(1,)),
    ]
    assert len({context_digest((1, 2), way) for way in ways}) == len(ways)
    assert context_digest((1, 2), Sampling(seed=3, max_tokens=9)) == context_digest(
        (1, 2), Sampling()
    )
