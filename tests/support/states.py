"""Runs whose state a test lays out, for the functions of one sub-machine."""

from typing import Any

from rollweave.core.core import Core
from rollweave.core.mechanisms.lengths.index import DomainLengths, Lengths, Work, reindex
from rollweave.core.mechanisms.relays.state import Relay, part_of
from rollweave.core.run import Run
from rollweave.core.state import (
    Group,
    GroupStatus,
    Stage,
    State,
    Trajectory,
    Turn,
)
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, GroupId, TrajectoryId
from rollweave.schema.hosts import HostSlot
from rollweave.schema.work import Purpose
from tests.support.core import ALLOCATION, config

E0, E1 = EngineId("e0"), EngineId("e1")

DEGREES = (1, 2, 4)
TAIL = [4000, *[10] * 40]
"""One trajectory is much longer than the others."""


def place_on_hosts(state: State, count: int) -> None:
    """Deal the engines to `count` hosts, each with a relay; 0: to one host without."""
    state.hosts.up = {number: HostSlot(number=number) for number in range(max(1, count))}
    part = part_of(state)
    if part is not None:
        part.relayed = count > 0
        part.relays = {f"r{number}": Relay(id=f"r{number}", host=number) for number in range(count)}
    for number, engine in enumerate(state.engines.values()):
        engine.seat.host = number % max(1, count)


def profile(degree: int, *, gain: float) -> tuple[e.StepTime, ...]:
    """The step times of an engine that is `gain` times as fast for twice the degree."""
    speed = gain ** (degree.bit_length() - 1)
    return tuple(e.StepTime(batch=batch, seconds=(1 + 0.1 * batch) / speed) for batch in (1, 4, 16))


def fleet(*degrees: int, lengths: list[int], gain: float = 1.9) -> Run:
    """A run whose engines have these degrees, and have measured all of DEGREES."""
    core = Core(config("bounded", rollout={"scheduling": "trajectory"}, allocation=ALLOCATION))
    slots = tuple(
        e.EngineSlot(id=EngineId(f"e{number}"), degree=degree)
        for number, degree in enumerate((*degrees, *DEGREES))
    )
    core.handle(0.0, e.RunStarted(engines=slots))
    for slot in slots:
        core.handle(
            0.0,
            e.EngineJoined(
                engine_id=slot.id,
                epoch=0,
                max_slots=16,
                kv_total_tokens=10**6,
                profile=profile(slot.degree, gain=gain),
            ),
        )
    for slot in slots[len(degrees) :]:
        del core.state.engines[slot.id]
    core.state.mechanisms["lengths"].domains["a"] = DomainLengths(
        lengths=lengths, length_sum=sum(lengths)
    )
    core.state.trainer.step = 1
    core._run.out = []
    return core._run


def running(
    *estimates: int, engine: EngineId | None = None, mode: str = "bounded", **sections: Any
) -> Run:
    """A run of one group whose members run, with these estimates of the remaining
    tokens, and two engines that serve.
    """
    rollout = {"scheduling": "trajectory", **sections.pop("rollout", {})}
    core = Core(config(mode, rollout=rollout, **{"weights": {"relays": 2}, **sections}))
    core.handle(
        0.0, e.RunStarted(engines=tuple(e.EngineSlot(id=engine_id) for engine_id in (E0, E1)))
    )
    for engine_id in (E0, E1):
        core.handle(
            0.0,
            e.EngineJoined(engine_id=engine_id, epoch=0, max_slots=4, kv_total_tokens=100),
        )
        core.state.engines[engine_id].version = 0
    run, state = core._run, core.state
    group = Group(
        id=GroupId("g9"),
        name="a",
        index=0,
        purpose=Purpose.TRAIN,
        since=0.0,
        status=GroupStatus.ACTIVE,
    )
    state.groups[group.id] = group
    if Lengths in run.parts:
        run.part(Lengths).domains["a"] = DomainLengths(turn_s=2.0, tool_s=1.0)
    for number, estimate in enumerate(estimates):
        trajectory = Trajectory(
            id=TrajectoryId(f"g9.{number}"),
            group_id=group.id,
            member=number,
            stage=Stage.RUN,
            launched_at=float(number),
            turn=Turn(number=0, context_tokens=0, since=0.0),
        )
        state.trajectories[trajectory.id] = trajectory
        begin_work(
            run,
            trajectory,
            estimate=estimate,
            kv_token_steps=estimate,
            kv_demand=40,
            predicted_at_turn=0,
            length_bucket=0,
            assigned_engine=engine,
            kv_resident=engine is not None,
        )
        reindex(run, trajectory)
    return run


def begin_work(run: Run, trajectory: Trajectory, **work: Any) -> None:
    """Begin with the attempt of a trajectory that is in no stage, for every mechanism
    that has a record of it.
    """
    run.follow(Stage.QUEUED, trajectory)
    if Lengths in run.parts:
        run.part(Lengths).trajectories[trajectory.id] = Work(**work)


def members(run: Run) -> list[Trajectory]:
    return [one for one in run.state.trajectories.values() if one.group_id == "g9"]
