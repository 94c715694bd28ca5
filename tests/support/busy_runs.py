"""The directory of a run that a page is to show: large, or with a state that does not
change.
"""

import socket
import time
from pathlib import Path

import msgspec

from rollweave.record.rundir import RunDir
from rollweave.record.store import Ended, Scored, TrajectoryStore
from rollweave.record.trace import ENVIRONMENTS, TRAINER, Trace
from rollweave.schema import work
from rollweave.schema.base import GroupId, TaskId, TrajectoryId
from rollweave.schema.status import EngineState, RunStatus, TrainerState, WaitStatus
from tests.support.synthetic_run import write_run

TOKENS, TURN = 320, 40


def write_large_run(path: Path, *, trajectories: int) -> RunDir:
    """Write a run with so many trajectories of 320 tokens and 8 turns, and their
    trace.
    """
    run = write_run(path, steps=3)
    sequence = _sequence()
    trace = Trace(run.trace)
    with TrajectoryStore(run.trajectories) as store:
        for number in range(trajectories):
            at, group = number * 0.05, number // 8
            name = TrajectoryId(f"g{1000 + group}.{number % 8}")
            reason = work.StopReason.FINISHED if number % 3 else work.StopReason.MAX_TURNS
            trajectory = work.Trajectory(
                id=name,
                group_id=GroupId(f"g{1000 + group}"),
                task=work.Task(
                    id=TaskId(f"task-{group % 500}"), env="game", seed=group, tag="game"
                ),
                attempt=0,
                initiated_version=group // 16,
                sequences=(sequence,),
                reward=None,
                stop_reason=reason,
                blame=work.BLAME_OF[reason],
            )
            store.append(Ended(at=at, purpose=work.Purpose.TRAIN, member=0, trajectory=trajectory))
            store.score(
                Scored(
                    at=at,
                    trajectory_id=name,
                    attempt=0,
                    reward=(number % 5) / 4,
                    success=number % 5 == 4,
                    stop_reason=reason,
                    blame=work.BLAME_OF[reason],
                    eval_s=0.01,
                )
            )
            for turn in range(TOKENS // TURN):
                begin = at + 0.1 * turn
                trace.span(ENVIRONMENTS, name, f"turn {turn} e{number % 4}", begin, begin + 0.08)
            trace.release(ENVIRONMENTS, name)
            if number % 64 == 0:
                trace.span(TRAINER, "trainer", f"train {number // 64}.0", at, at + 1.0)
    trace.close()
    return run


def _sequence() -> work.TokenSequence:
    segments = [
        work.Segment(
            start=start,
            end=start + TURN // 2,
            kind=work.SegmentKind.OUTPUT if output else work.SegmentKind.OBSERVATION,
            version=3 if output else -1,
        )
        for number, start in enumerate(range(0, TOKENS, TURN // 2))
        for output in [number % 2 == 1]
    ]
    return work.TokenSequence(
        tokens=tuple(range(TOKENS)),
        segments=tuple(segments),
        logprobs=tuple(-0.25 for _ in range(TOKENS)),
        turns=tuple(
            work.TurnSpan(start=part.start, end=part.end)
            for part in segments
            if part.kind is work.SegmentKind.OUTPUT
        ),
    )


def write_status(run: RunDir, *, pid: int, age_s: float = 0.0, ended: bool = False) -> RunStatus:
    """Write the state of a run whose environments do not answer."""
    status = RunStatus(
        at=412.0,
        written_at=time.time() - age_s,
        machine=socket.gethostname(),
        pid=pid,
        ended=ended,
        phase="running",
        step=12,
        steps=40,
        attempts={"queued": 4, "starting": 0, "running": 16, "in evaluation": 0, "ending": 0},
        buffered=3,
        wanted=4,
        version=12,
        engines=(
            EngineState(id="e0", status="serving", seconds=180.0, version=12, busy=1, slots=16),
            EngineState(
                id="e1", status="serving", seconds=180.0, host=1, version=12, busy=0, slots=16
            ),
        ),
        trainer=TrainerState(status="idle", seconds=171.0, step=12, hosts=(0,)),
        hosts={0: "gpu-1", 1: "gpu-2"},
        waits=(
            WaitStatus(
                waiter="the trainer",
                target="the batch of step 12",
                what="3 of 4 groups are complete",
                seconds=171.0,
                usual_s=0.6,
            ),
            WaitStatus(
                waiter="attempts",
                target="environments of calculator",
                what="stepping",
                count=15,
                seconds=168.4,
                limit_s=310.0,
                oldest="g47.2",
            ),
            WaitStatus(
                waiter="engines without turns",
                target="environments",
                what="their steps lead to the next turns",
                oldest="e1",
            ),
            WaitStatus(
                waiter="attempts",
                target="engine e0",
                what="sampling their turns",
                seconds=0.4,
                limit_s=60.0,
                oldest="g48.0",
            ),
        ),
    )
    run.status.write_bytes(msgspec.json.encode(status))
    return status
