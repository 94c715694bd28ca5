"""The index of trajectories by length, against a look at all of them."""

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.length_index import LengthIndex
from rollweave.core.state import Stage, Trajectory
from rollweave.schema.base import EngineId, GroupId, TrajectoryId
from tests.support.properties import examples

ENGINES = (EngineId("e0"), EngineId("e1"))
UNDER_WAY = (Stage.QUEUED, Stage.INIT, Stage.RUN)

trajectories = st.lists(
    st.builds(
        Trajectory,
        id=st.integers(0, 6).map(lambda number: TrajectoryId(f"g0.{number}")),
        group_id=st.just(GroupId("g0")),
        member=st.just(0),
        stage=st.sampled_from([*UNDER_WAY, Stage.EVAL, Stage.ENDED]),
        estimate=st.integers(1, 5),
        output_tokens=st.integers(0, 3),
        kv_token_steps=st.integers(0, 50),
        kv_demand=st.integers(1, 9),
        kv_resident=st.booleans(),
        length_bucket=st.none() | st.integers(0, 3),
        launched_at=st.integers(0, 3).map(float),
        assigned_engine=st.sampled_from([None, *ENGINES]),
    ),
    min_size=1,
    max_size=20,
)
"""Changes of few trajectories: the last of the same id counts."""


@settings(max_examples=examples(200))
@given(changes=trajectories, by_level=st.booleans())
def test_the_index_answers_as_a_look_at_all_trajectories(
    changes: list[Trajectory], by_level: bool
) -> None:
    index = LengthIndex(by_level=by_level)
    now: dict[TrajectoryId, Trajectory] = {}
    for changed in changes:
        now[changed.id] = copy.copy(changed)
        index.update(now[changed.id])
        under_way = [one for one in now.values() if one.stage in UNDER_WAY]
        assert index.count("") == len(under_way)
        longest_first = sorted(
            under_way, key=lambda one: (-one.output_tokens - one.estimate, one.id)
        )
        assert [index.rank(one.id) for one in longest_first] == list(range(len(under_way)))
        assert index.works("") == sorted(
            ((one.estimate, one.kv_token_steps) for one in under_way), reverse=True
        )
        for engine_id in ENGINES:
            check_engine(index, engine_id, under_way, by_level)
    for name in now:
        index.drop(name)
    assert index == LengthIndex(by_level=by_level)


def check_engine(
    index: LengthIndex, engine_id: EngineId, under_way: list[Trajectory], by_level: bool
) -> None:
    assigned = [one for one in under_way if one.assigned_engine == engine_id]
    assert (engine_id in index.loads) is bool(assigned)
    if assigned:
        load = index.loads[engine_id]
        assert load.tokens == sum(one.estimate for one in assigned)
        assert load.occupied == sum(one.kv_token_steps for one in assigned)
        assert load.longest == max(one.estimate for one in assigned)
        assert load.work_s is None, "the cached seconds are of the former trajectories"

    def claims_at(one: Trajectory) -> tuple[int, float, str]:
        return (-(one.length_bucket or 0) if by_level else 0, one.launched_at, one.id)

    residents = sorted((one for one in assigned if one.kv_resident), key=claims_at)
    for one in under_way:
        before = [
            other
            for other in residents
            if one not in residents or claims_at(other) < claims_at(one)
        ]
        assert index.ahead_of(one, engine_id) == [
            (*claims_at(other), other.kv_demand) for other in before
        ]


def test_a_change_discards_the_cached_work() -> None:
    index = LengthIndex(by_level=True)
    for number in range(2):
        index.update(
            Trajectory(
                id=TrajectoryId(f"g0.{number}"),
                group_id=GroupId("g0"),
                member=number,
                estimate=5,
                assigned_engine=ENGINES[0],
            )
        )
    load = index.loads[ENGINES[0]]
    load.work_s = 3.0
    index.drop(TrajectoryId("g0.1"))
    assert load.work_s is None
    load.work_s = 3.0
    index.update(
        Trajectory(
            id=TrajectoryId("g0.2"),
            group_id=GroupId("g0"),
            member=2,
            estimate=5,
            assigned_engine=ENGINES[0],
        )
    )
    assert load.work_s is None
