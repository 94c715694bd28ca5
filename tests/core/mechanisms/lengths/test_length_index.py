"""The index of trajectories by length, against a look at all of them."""

import copy
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.mechanisms.lengths.index import LengthIndex, Work
from rollweave.core.state import Stage, Trajectory
from rollweave.schema.base import EngineId, GroupId, TrajectoryId
from tests.support.properties import examples

ENGINES = (EngineId("e0"), EngineId("e1"))
UNDER_WAY = (Stage.QUEUED, Stage.INIT, Stage.RUN)

trajectories = st.lists(
    st.tuples(
        st.builds(
            Trajectory,
            id=st.integers(0, 6).map(lambda number: TrajectoryId(f"g0.{number}")),
            group_id=st.just(GroupId("g0")),
            member=st.just(0),
            stage=st.sampled_from([*UNDER_WAY, Stage.EVAL, Stage.ENDED]),
            output_tokens=st.integers(0, 3),
            launched_at=st.integers(0, 3).map(float),
        ),
        st.builds(
            Work,
            estimate=st.integers(1, 5),
            kv_token_steps=st.integers(0, 50),
            kv_demand=st.integers(1, 9),
            kv_resident=st.booleans(),
            length_bucket=st.none() | st.integers(0, 3),
            assigned_engine=st.sampled_from([None, *ENGINES]),
        ),
    ),
    min_size=1,
    max_size=20,
)
"""Changes of few trajectories: the last of the same id counts."""


@settings(max_examples=examples(200))
@given(changes=trajectories, by_level=st.booleans())
def test_the_index_answers_as_a_look_at_all_trajectories(
    changes: list[tuple[Trajectory, Work]], by_level: bool
) -> None:
    works: dict[TrajectoryId, Work] = {}
    index = LengthIndex(works, by_level=by_level)
    now: dict[TrajectoryId, Trajectory] = {}
    for changed, work in changes:
        now[changed.id], works[changed.id] = copy.copy(changed), work
        index.update(now[changed.id])
        under_way = [Both(one, works[one.id]) for one in now.values() if one.stage in UNDER_WAY]
        assert index.count("") == len(under_way)
        longest_first = sorted(
            under_way, key=lambda one: (-one.trajectory.output_tokens - one.work.estimate, one.id)
        )
        assert [index.rank(one.id) for one in longest_first] == list(range(len(under_way)))
        assert index.works("") == sorted(
            ((one.work.estimate, one.work.kv_token_steps) for one in under_way), reverse=True
        )
        for engine_id in ENGINES:
            check_engine(index, engine_id, under_way, by_level)
    for name in now:
        index.drop(name)
    assert index == LengthIndex(works, by_level=by_level)


class Both(NamedTuple):
    """A trajectory and its work."""

    trajectory: Trajectory
    work: Work

    @property
    def id(self) -> TrajectoryId:
        return self.trajectory.id


def check_engine(
    index: LengthIndex, engine_id: EngineId, under_way: list[Both], by_level: bool
) -> None:
    assigned = [one for one in under_way if one.work.assigned_engine == engine_id]
    assert (engine_id in index.loads) is bool(assigned)
    if assigned:
        load = index.loads[engine_id]
        assert load.tokens == sum(one.work.estimate for one in assigned)
        assert load.occupied == sum(one.work.kv_token_steps for one in assigned)
        assert load.longest == max(one.work.estimate for one in assigned)
        assert load.work_s is None, "the cached seconds are of the former trajectories"

    def claims_at(one: Both) -> tuple[int, float, str]:
        return (
            -(one.work.length_bucket or 0) if by_level else 0,
            one.trajectory.launched_at,
            one.id,
        )

    residents = sorted((one for one in assigned if one.work.kv_resident), key=claims_at)
    for one in under_way:
        before = [
            other
            for other in residents
            if one not in residents or claims_at(other) < claims_at(one)
        ]
        assert index.ahead_of(one.trajectory, engine_id) == [
            (*claims_at(other), other.work.kv_demand) for other in before
        ]


def test_a_change_discards_the_cached_work() -> None:
    trajectories = [of_number(number) for number in range(3)]
    work = Work(estimate=5, assigned_engine=ENGINES[0])
    index = LengthIndex({one.id: work for one in trajectories}, by_level=True)
    for one in trajectories[:2]:
        index.update(one)
    load = index.loads[ENGINES[0]]
    load.work_s = 3.0
    index.drop(TrajectoryId("g0.1"))
    assert load.work_s is None
    load.work_s = 3.0
    index.update(trajectories[2])
    assert load.work_s is None


def of_number(number: int) -> Trajectory:
    return Trajectory(id=TrajectoryId(f"g0.{number}"), group_id=GroupId("g0"), member=number)
