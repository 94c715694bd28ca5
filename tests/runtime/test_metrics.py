"""A line describes what a step added, once per step, and sinks get the same numbers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollweave.core.state import State
from rollweave.runtime.metrics import Metrics, Silent
from rollweave.schema.base import EngineId, GroupId, TaskId, TrajectoryId
from rollweave.schema.commands import GroupRef, RecordEvaluation, TrainStep
from rollweave.schema.serving import EngineStats, LendingStats
from rollweave.schema.training import TrainMetrics
from rollweave.schema.work import (
    Batch,
    Blame,
    ScoredGroup,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TokenSequence,
    Trajectory,
    TurnSpan,
)


class ListSink:
    def __init__(self) -> None:
        self.written: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.written.append((step, values))

    def close(self) -> None:
        self.closed = True


def trajectory(
    name: str, reward: float, *, version: int, success: bool | None = None
) -> Trajectory:
    return Trajectory(
        id=TrajectoryId(name),
        group_id=GroupId("g"),
        task=Task(id=TaskId("t"), env="x", seed=0),
        attempt=0,
        initiated_version=version,
        sequences=(),
        reward=reward,
        success=success,
        stop_reason=StopReason.FINISHED,
        blame=Blame.NONE,
    )


def part(number: int, env: str, *trajectories: Trajectory) -> tuple[TrainStep, Batch, TrainMetrics]:
    group = ScoredGroup(id=GroupId("g"), env=env, trajectories=trajectories)
    reference = GroupRef(
        id=GroupId("g"),
        name=env,
        trajectory_ids=tuple(trajectory.id for trajectory in trajectories),
    )
    return (
        TrainStep(step=3, part=number, parts=2, groups=(reference,)),
        Batch(step=3, version=3, part=number, parts=2, groups=(group,)),
        TrainMetrics(values={"loss": float(number)}, tokens=10, train_s=0.5),
    )


def test_an_engine_that_strays_from_the_trainer_is_warned_of_once(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    metrics = Metrics(file, clock=lambda: 1.0, state=State, progress=Silent(), max_gap=1e-3)
    # wide, wide, not measured, agreeing, wide
    for gap in (0.5, 0.4, None, 0.0, 0.25):
        values = {"logprob_gap/e1": 0.0} | ({} if gap is None else {"logprob_gap/e0": gap})
        command, batch, trained = part(0, "lake", trajectory("a", 1.0, version=3))
        metrics.trained(
            msgspec.structs.replace(command, parts=1),
            batch,
            msgspec.structs.replace(trained, values=values),
        )
    metrics.close()
    read = [json.loads(line) for line in file.read_text().splitlines()]
    warnings = [line for line in read if line["kind"] == "warning"]
    assert [line["component"] for line in warnings] == ["e0", "e0"]
    assert "by 0.5 on average at step 3" in warnings[0]["message"]
    assert "by 0.25 on average" in warnings[1]["message"]


def test_staleness_counts_the_way_back_from_discarded_weights(tmp_path: Path) -> None:
    """One trajectory is of version 3, before the trainer was restored to step 2."""
    metrics = Metrics(tmp_path / "m.jsonl", clock=lambda: 1.0, state=State, progress=Silent())
    discarded = trajectory("a", 1.0, version=3)
    command, batch, trained = part(0, "lake", discarded, trajectory("b", 0.0, version=1))
    (group,) = batch.groups
    group = msgspec.structs.replace(group, restored_to={discarded.id: 2})
    metrics.trained(command, msgspec.structs.replace(batch, groups=(group,)), trained)
    metrics.trained(*part(1, "lake", trajectory("c", 0.5, version=3)))
    metrics.close()
    (line,) = (tmp_path / "m.jsonl").read_text().splitlines()
    assert json.loads(line)["staleness"] == {"0": 1, "2": 2}


def test_ages_of_a_step_are_shares_of_all_its_parts(tmp_path: Path) -> None:
    """An age that one part has and another has not is not averaged over the former."""
    metrics = Metrics(tmp_path / "m.jsonl", clock=lambda: 1.0, state=State, progress=Silent())
    for number, ages in enumerate(({"age/0": 0.5, "age/1": 0.5}, {"age/0": 1.0})):
        command, batch, values = part(number, "lake", trajectory("a", 1.0, version=3))
        metrics.trained(command, batch, msgspec.structs.replace(values, values=ages))
    metrics.close()
    (line,) = (tmp_path / "m.jsonl").read_text().splitlines()
    trained = json.loads(line)["trainer"]
    assert (trained["age/0"], trained["age/1"]) == (0.75, 0.25)


def test_the_line_of_a_step_has_the_loan_of_an_engine(tmp_path: Path) -> None:
    """All numbers of the loan are in the line, and become numbers of the mirrors."""
    loan = msgspec.convert(
        {name: number for number, name in enumerate(LendingStats.__struct_fields__[1:], 1)}
        | {"lent": True},
        LendingStats,
    )
    stats = EngineStats(version=3, running=1, waiting=0, kv_used_tokens=0, kv_total_tokens=9)
    sink = ListSink()
    metrics = Metrics(
        tmp_path / "m.jsonl", clock=lambda: 1.0, state=State, progress=Silent(), sinks=[sink]
    )
    metrics.sampled({EngineId("e0"): msgspec.structs.replace(stats, lending=loan)})
    for number in range(2):
        metrics.trained(*part(number, "lake", trajectory("a", 1.0, version=3)))
    metrics.close()
    line = json.loads((tmp_path / "m.jsonl").read_text())
    assert msgspec.convert(line["engines"]["e0"]["lending"], LendingStats) == loan
    ((_, mirrored),) = sink.written
    assert mirrored["engines/e0/lending/rollout_tokens"] == loan.rollout_tokens


def test_a_step_of_several_parts_is_one_line(tmp_path: Path) -> None:
    state, sink, times = State(), ListSink(), iter([10.0, 14.0, 15.0])
    state.counters.output_tokens = 100
    state.evaluations.defines_success = {
        "nim": None
    }  # "lake" gives rewards, and does not define success
    state.idle.trainer = {"busy": 1.0}
    metrics = Metrics(
        tmp_path / "m.jsonl",
        clock=lambda: next(times),
        state=lambda: state,
        progress=Silent(),
        sinks=[sink],
    )
    metrics.sampled(
        {
            EngineId("e0"): EngineStats(
                version=3, running=1, waiting=0, kv_used_tokens=0, kv_total_tokens=9
            )
        }
    )
    metrics.trained(
        *part(0, "lake", trajectory("a", 1.0, version=3), trajectory("b", 0.0, version=2))
    )
    state.counters.output_tokens = 180
    state.counters.stop_reasons = {"finished": 4}
    state.idle.trainer = {"busy": 3.0, "batch": 1.0}
    metrics.trained(*part(1, "nim", trajectory("c", 0.5, version=3, success=False)))
    metrics.evaluated(
        RecordEvaluation(
            version=3,
            final=True,
            success={"lake": 0.5},
            reward={"lake": 0.5},
            episodes={"lake": 2},
            distinct={"lake": 1},
            failed={},
        )
    )
    metrics.close()
    step, evaluation = [
        json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()
    ]
    expected: dict[str, Any] = {
        "kind": "step",
        "step": 3,
        "at": 14.0,
        "reward": {"lake": 0.5, "nim": 0.5},
        "success": {"nim": 0.0},
        "staleness": {"0": 2, "1": 1},
        "trajectories": 3,
        "trainer": {"loss": 0.5, "train_s": 1.0, "trained_tokens": 20.0},
        "wall_s": 4.0,
        "output_tokens": 80,
        "tokens_per_s": 20.0,
        "stop_reasons": {"finished": 4},
    }
    assert {name: step[name] for name in expected} == expected
    assert step["idle"]["trainer"] == {"busy": 2.0, "batch": 1.0}
    assert step["engines"]["e0"]["version"] == 3
    assert evaluation["success"] == {"lake": 0.5}
    assert metrics.final_evaluation == metrics.last_evaluation
    assert [number for number, _ in sink.written] == [3, 3]
    assert sink.written[0][1]["reward/lake"] == 0.5
    assert sink.written[1][1]["evaluation/success/lake"] == 0.5
    assert sink.closed


def test_the_means_of_a_step_are_those_of_all_its_trajectories(tmp_path: Path) -> None:
    """A missing reward counts as 0, and a missing success as none."""
    state = State()
    state.evaluations.defines_success = {"lake": None}
    metrics = Metrics(tmp_path / "m", clock=lambda: 1.0, state=lambda: state, progress=Silent())
    segments = tuple(
        Segment(start=at, end=at + 1, kind=SegmentKind.OUTPUT, version=3) for at in range(4)
    )
    turns = (TurnSpan(start=0, end=1), TurnSpan(start=1, end=3), TurnSpan(start=3, end=4))
    tokens = TokenSequence(
        tokens=(1, 2, 3, 4), segments=segments, logprobs=(-0.5,) * 4, turns=turns
    )
    good, bad, bare = (
        msgspec.structs.replace(trajectory(name, 1.0, version=3, success=success), **fields)
        for name, success, fields in (
            ("a", True, {"rewards": {"form": 0.5, "answer": 0.25}, "sequences": (tokens, tokens)}),
            ("b", None, {"rewards": {"form": 1.0}, "reward": None}),
            ("c", False, {"reward": 0.25}),
        )
    )
    metrics.trained(*part(0, "lake", good, bad))
    metrics.trained(*part(1, "lake", bare, bare))
    metrics.close()
    line = json.loads((tmp_path / "m").read_text())
    assert line["reward"] == {"lake": (1.0 + 0.0 + 0.25 + 0.25) / 4}
    assert line["rewards"] == {"lake": {"form": 0.75, "answer": 0.25}}
    assert line["success"] == {"lake": 0.25}
    assert (line["trajectories"], line["batch_tokens"], line["turns_mean"]) == (4, 8, 6 / 4)


def test_parts_of_a_lost_step_do_not_count(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl", clock=lambda: 1.0, state=State, progress=Silent())
    lost = part(0, "lake", trajectory("a", 1.0, version=3))
    metrics.trained(*lost)
    # the trainer was restarted, and begins the step again
    metrics.trained(*part(0, "lake", trajectory("b", 0.0, version=3)))
    metrics.trained(*part(1, "lake", trajectory("c", 0.0, version=3)))
    metrics.close()
    (line,) = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert (line["trajectories"], line["reward"]) == (2, {"lake": 0.0})


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "started"}\n{"kind": "st')
    metrics = Metrics(path, clock=lambda: 1.0, state=State, progress=Silent())
    metrics.event("resumed")
    metrics.close()
    expected = ["started", "resumed"]
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == expected
