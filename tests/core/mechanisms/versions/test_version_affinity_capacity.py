"""Engines launch trajectories by their capacity in mode decoupled."""

from rollweave.core.mechanisms.lengths.index import index_of
from rollweave.core.mechanisms.versions import binding as affinity
from rollweave.core.mechanisms.versions.binding import BATCH_PER_SLOT, batch_of
from rollweave.core.run import Run
from rollweave.core.state import EngineStatus, Evaluation, Stage
from rollweave.schema.base import TrajectoryId
from rollweave.schema.work import Purpose
from tests.support.hand import E0, E1, Hand, decoupled_config


def two_engines(*, batch: int = 3, **rollout: object) -> Run:
    """Two engines of two slots serve version 0, without trajectories."""
    run = Hand(decoupled_config(batch=batch, rollout=rollout)).core._run
    state = run.state
    for name in list(state.trajectories):
        index_of(run).drop(name)
    state.trajectories.clear()
    for pool in ("queued", "init", "run", "closing"):
        getattr(state.pools, pool).clear()
    for engine in state.engines.values():
        engine.active.clear()
        batch_of(run, engine).launched = 0
    run.fleet_changed()
    return run


def test_a_batch_is_bounded_by_the_share_of_all_trajectories() -> None:
    run = two_engines(batch=3)
    engine = run.state.engines[E0]
    assert affinity.batch_size(run, engine) == 3
    assert affinity.batch_size(two_engines(batch=3, max_running=5), engine) == 3
    assert affinity.batch_size(two_engines(batch=3, max_running=4), engine) == 2
    assert affinity.batch_size(two_engines(batch=3, max_running=1), engine) == 1
    large = two_engines(batch=3, max_running=64)
    assert affinity.batch_size(large, engine) == BATCH_PER_SLOT * engine.abilities.max_slots


def test_the_pool_takes_what_engines_have_room_for() -> None:
    run = two_engines(max_running=64)
    assert affinity.free_capacity(run) == 8
    for pool, name in ((run.state.pools.init, "x"), (run.state.pools.run, "y")):
        pool[TrajectoryId(name)] = None
    assert affinity.free_capacity(run) == 8, "these have no engine"
    run = two_engines(batch=3, max_running=6)
    run.state.pools.init[TrajectoryId("x")] = None
    run.state.pools.closing[TrajectoryId("y")] = Stage.RUN
    run.state.pools.run[TrajectoryId("z")] = None
    assert affinity.free_capacity(run) == 3
    for number in range(4):
        run.state.pools.run[TrajectoryId(f"r{number}")] = None
    assert affinity.free_capacity(run) == 0


def test_the_buffer_takes_a_batch_and_what_engines_work_on() -> None:
    """Groups of two: six trajectories at once are three groups."""
    run = two_engines(batch=3, groups_per_step=2)
    assert affinity.buffer_capacity(run) == 2 + 3
    assert affinity.buffer_limit(run) == 2 + 3 + run.config.rollout.max_running
    assert affinity.buffer_capacity(two_engines(batch=3, groups_per_step=4)) == 4 + 4
    assert affinity.buffer_capacity(two_engines(batch=3, max_running=3, groups_per_step=1)) == 3


def test_the_emptiest_engine_launches() -> None:
    run = two_engines(batch=3)
    first, second = run.state.engines.values()
    assert affinity.engine_for(run, Purpose.TRAIN) is first
    first.leaving = True
    assert affinity.engine_for(run, Purpose.TRAIN) is second
    second.version = second.publication_id = -5
    batch_of(run, second).launched = 3
    assert affinity.engine_for(run, Purpose.TRAIN) is None, "it has launched its batch"
    batch_of(run, second).launched = 2
    assert affinity.engine_for(run, Purpose.TRAIN) is second


def test_only_engines_of_the_evaluated_version_take_episodes() -> None:
    run = two_engines(batch=3)
    first, second = run.state.engines.values()
    assert affinity.engine_for(run, Purpose.EVAL) is None
    run.state.evaluations.current = Evaluation(
        version=7, final=False, to_draw=[], publication_id=70
    )
    assert affinity.engine_for(run, Purpose.EVAL) is None
    second.publication_id = 70
    assert affinity.engine_for(run, Purpose.EVAL) is second
    second.leaving = True
    assert affinity.engine_for(run, Purpose.EVAL) is None
    assert first.publication_id != 70


def test_what_an_engine_launches_after_a_load() -> None:
    """A batch under the newest weights; under others what waits for them alone."""
    run = two_engines(batch=3)
    engine = run.state.engines[E0]
    batch = batch_of(run, engine)
    engine.loading.id, batch.launched, batch.peak_kv = run.state.publication.id, 9, 50
    affinity.begin_load(run, engine)
    assert (batch.launched, batch.peak_kv) == (0, None)
    engine.loading.id = 55
    affinity.begin_load(run, engine)
    assert batch_of(run, engine).launched == 3


def test_checkpoints_that_are_read_or_waited_for_are_needed() -> None:
    run = two_engines()
    first, second = run.state.engines.values()
    first.loading.step, first.status = 3, EngineStatus.LOADING
    second.loading.step = 4
    assert affinity.needed_checkpoints(run) == {3}
    first.status = EngineStatus.SERVING
    assert affinity.needed_checkpoints(run) == set()
    assert not affinity.is_bound(run, run.state.engines[E1])
