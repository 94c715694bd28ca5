"""An engine loads other weights, or goes without if it cannot."""

import pytest

from rollweave.core import weight_updates
from rollweave.core.run import Run
from rollweave.core.state import EngineStatus, Evaluation
from rollweave.core.weight_updates import MAX_LOAD_FAILURES
from rollweave.schema import commands as c
from rollweave.schema import events as e
from tests.support.kinds import of
from tests.support.states import E0, E1, place_on_hosts, running


def updating(status: EngineStatus = EngineStatus.LOADING, *, hosts: int = 0) -> Run:
    """Version 2, of weights 20, is published; the first engine has version 1 and is in
    this status.
    """
    run = running()
    state = run.state
    for engine in state.engines.values():
        engine.status, engine.version, engine.publication_id = EngineStatus.SERVING, 1, 10
    first = state.engines[E0]
    first.status, first.loading.id = status, 20
    state.publication.version, state.publication.id = 2, 20
    state.publication.retained = {20: 2}
    place_on_hosts(state, hosts)
    for relay in state.mechanisms["relays"].relays.values():
        relay.versions = [20]
    run.fleet_changed()
    run.out = []
    return run


def loaded(run: Run, *, publication_id: int = 20, epoch: int = 0) -> None:
    weight_updates.on_loaded(
        run, e.WeightsLoaded(engine_id=E0, epoch=epoch, publication_id=publication_id, version=2)
    )


def failed(run: Run, *, publication_id: int = 20) -> None:
    weight_updates.on_load_failed(
        run, e.WeightsLoadFailed(engine_id=E0, epoch=0, publication_id=publication_id, error="torn")
    )


def loads(run: Run) -> list[tuple[int, int, int | None]]:
    return [
        (one.version, one.publication_id, one.from_checkpoint) for one in of(run.out, c.LoadWeights)
    ]


def test_a_load_that_succeeded_forgives_failures_and_resumes() -> None:
    run = updating()
    engine = run.state.engines[E0]
    engine.failures.restarts, engine.failures.load_failures = 2, 1
    loaded(run)
    assert (engine.status, engine.version, engine.publication_id) == (EngineStatus.SERVING, 2, 20)
    assert (engine.failures.restarts, engine.failures.load_failures) == (0, 0)
    assert run.out == [c.ResumeEngine(engine_id=E0)]


def test_the_first_load_forgives_no_restart() -> None:
    run = updating()
    engine = run.state.engines[E0]
    engine.version, engine.failures.restarts = -1, 2
    loaded(run)
    assert (engine.version, engine.failures.restarts) == (2, 2)


@pytest.mark.parametrize("late", ["weights", "epoch", "status"])
def test_news_of_another_load_is_ignored(late: str) -> None:
    run = updating(EngineStatus.SERVING if late == "status" else EngineStatus.LOADING)
    loaded(run, publication_id=19 if late == "weights" else 20, epoch=1 if late == "epoch" else 0)
    assert run.state.engines[E0].version == 1
    failed(run, publication_id=19 if late == "weights" else 20) if late != "epoch" else None
    assert run.state.engines[E0].failures.load_failures == 0


def test_a_failed_load_is_tried_again_and_then_the_engine_restarts() -> None:
    run = updating(hosts=2)
    engine = run.state.engines[E0]
    for failure in range(1, MAX_LOAD_FAILURES):
        failed(run)
        assert engine.failures.load_failures == failure
        assert loads(run) == [(2, 20, None)] * failure
    assert run.state.mechanisms["relays"].relays["r0"].restart_reason == ""
    failed(run)
    assert engine.status is EngineStatus.STARTING
    assert run.state.mechanisms["relays"].relays["r0"].restart_reason == "e0 cannot load from it"
    assert run.state.mechanisms["relays"].relays["r1"].restart_reason == ""


def test_a_suspended_engine_loads_the_newest_weights() -> None:
    run = updating(EngineStatus.SUSPENDING)
    weight_updates.on_suspended(run, e.EngineSuspended(engine_id=E0, epoch=0))
    engine = run.state.engines[E0]
    expected = (EngineStatus.LOADING, 20, None)
    assert (engine.status, engine.loading.id, engine.loading.step) == expected
    assert loads(run) == [(2, 20, None)]
    weight_updates.on_suspended(run, e.EngineSuspended(engine_id=E1, epoch=0))
    assert len(loads(run)) == 1, "it serves"


@pytest.mark.parametrize(("hosts", "status"), [(2, EngineStatus.SERVING), (0, EngineStatus.STALE)])
def test_an_engine_whose_weights_are_gone_serves_on_or_waits(
    hosts: int, status: EngineStatus
) -> None:
    """With relays the published weights come again when the relay does."""
    run = updating(EngineStatus.SUSPENDING, hosts=hosts)
    run.state.publication.retained = {}
    weight_updates.on_suspended(run, e.EngineSuspended(engine_id=E0, epoch=0))
    engine = run.state.engines[E0]
    assert (engine.status, engine.loading.id) == (status, -1)
    assert loads(run) == []


@pytest.mark.parametrize(("version", "status"), [(1, "serving"), (0, "stale")])
def test_an_evaluation_holds_newer_weights_back(version: int, status: str) -> None:
    run = updating(EngineStatus.SUSPENDING)
    run.state.evaluations.current = Evaluation(
        version=1, final=False, to_draw=[], publication_id=10, started=True
    )
    run.state.engines[E0].version = version
    weight_updates.on_suspended(run, e.EngineSuspended(engine_id=E0, epoch=0))
    assert run.state.engines[E0].status == status
    assert loads(run) == []


# Staging: an engine receives new weights while it serves.


def staging(*, working: bool = True, decoupled: bool = False) -> Run:
    """Version 2 is published, and the first engine, which serves version 1, can receive
    it while it serves. With `working`, a trajectory is under way.
    """
    run = updating(EngineStatus.SERVING)
    first = run.state.engines[E0]
    first.abilities.stages, first.loading.id = True, -1
    del run.state.engines[E1]
    run.fleet_changed()
    if working:
        run.state.pools.run["t"] = None  # type: ignore[index]
    return run


def staged(run: Run, publication_id: int = 20, *, epoch: int = 0) -> None:
    weight_updates.on_staged(
        run, e.WeightsStaged(engine_id=E0, epoch=epoch, publication_id=publication_id)
    )


def test_a_serving_engine_receives_weights_and_is_suspended_for_the_swap_only() -> None:
    run = staging()
    engine, counted = run.state.engines[E0], run.state.counters.weights
    weight_updates.update(run)
    assert run.out == [c.StageWeights(engine_id=E0, version=2, publication_id=20)]
    assert engine.status is EngineStatus.SERVING
    weight_updates.update(run)
    assert len(run.out) == 1, "it is receiving them"
    run.now += 5.0
    staged(run)
    weight_updates.update(run)
    assert run.out[1:] == [c.SuspendEngine(engine_id=E0)]
    weight_updates.on_suspended(run, e.EngineSuspended(engine_id=E0, epoch=0))
    assert loads(run) == [(2, 20, None)]
    run.now += 0.25
    loaded(run)
    assert (counted.updates, counted.staged) == (1, 1)
    assert (counted.transfer_s, counted.stopped_s) == (5.0, 0.25)
    assert (engine.publication_id, engine.staging.staged_id, engine.staging.id) == (20, -1, -1)


@pytest.mark.parametrize("why", ["cannot", "idle", "ablation", "failed before"])
def test_an_engine_that_stages_nothing_is_suspended_for_the_whole_load(why: str) -> None:
    run = staging(working=why != "idle")
    engine, counted = run.state.engines[E0], run.state.counters.weights
    if why == "cannot":
        engine.abilities.stages = False
    elif why == "ablation":
        ablation = run.config.ablation.model_copy(update={"changes": ("no_staging",)})
        run.config = run.config.model_copy(update={"ablation": ablation})
    elif why == "failed before":
        engine.staging.unstaged_id = 20
    weight_updates.update(run)
    assert run.out == [c.SuspendEngine(engine_id=E0)]
    weight_updates.on_suspended(run, e.EngineSuspended(engine_id=E0, epoch=0))
    run.now += 5.0
    loaded(run)
    assert (counted.updates, counted.staged) == (1, 0)
    assert (counted.transfer_s, counted.stopped_s) == (5.0, 5.0)


def test_failed_staging_leaves_the_old_weights_serving_until_the_load() -> None:
    run = staging()
    engine = run.state.engines[E0]
    weight_updates.update(run)
    failed = e.StagingFailed(engine_id=E0, epoch=0, publication_id=20, error="torn")
    weight_updates.on_staging_failed(run, failed)
    expected = (EngineStatus.SERVING, 1, 0)
    assert (engine.status, engine.version, engine.failures.load_failures) == expected
    assert run.state.counters.watchdog == {"staging_failed": 1}
    assert (engine.staging.id, engine.staging.unstaged_id) == (-1, 20)
    run.out = []
    weight_updates.update(run)
    assert run.out == [c.SuspendEngine(engine_id=E0)]


def test_weights_published_in_the_meantime_follow_those_that_were_staged() -> None:
    """Otherwise an engine that receives more slowly than the trainer publishes would
    never update.
    """
    run = staging()
    engine = run.state.engines[E0]
    weight_updates.update(run)
    run.state.publication.version, run.state.publication.id = 3, 30
    run.state.publication.retained = {20: 2, 30: 3}
    weight_updates.update(run)
    assert len(run.out) == 1
    staged(run)
    weight_updates.update(run)
    weight_updates.on_suspended(run, e.EngineSuspended(engine_id=E0, epoch=0))
    assert loads(run) == [(2, 20, None)]
    loaded(run)
    run.out = []
    weight_updates.update(run)
    assert run.out == [c.StageWeights(engine_id=E0, version=3, publication_id=30)]
    assert engine.publication_id == 20


def test_older_weights_than_its_own_are_not_kept_by_an_engine() -> None:
    run = staging()
    engine = run.state.engines[E0]
    weight_updates.update(run)
    engine.publication_id = 25
    staged(run)
    assert (engine.staging.id, engine.staging.staged_id) == (-1, -1)


@pytest.mark.parametrize("late", ["weights", "epoch"])
def test_late_news_of_staging_is_ignored(late: str) -> None:
    run = staging()
    weight_updates.update(run)
    staged(run, 19 if late == "weights" else 20, epoch=1 if late == "epoch" else 0)
    weight_updates.update(run)
    assert len(run.out) == 1
    assert run.state.engines[E0].staging.staged_id == -1


def test_staged_weights_that_are_no_longer_in_memory_are_not_swapped_in() -> None:
    run = staging()
    weight_updates.update(run)
    staged(run)
    run.state.publication.version, run.state.publication.id = 3, 30
    run.state.publication.retained, run.out = {30: 3}, []
    weight_updates.update(run)
    assert run.out == [c.StageWeights(engine_id=E0, version=3, publication_id=30)]


def test_nothing_is_staged_for_an_evaluation_while_no_trajectory_hides_the_transfer() -> None:
    run = staging(working=False)
    run.state.evaluations.current = Evaluation(
        version=1, final=False, to_draw=[], publication_id=10, started=True
    )
    weight_updates.update(run)
    assert run.out == []


def test_weights_are_staged_while_an_evaluation_holds_them_back() -> None:
    run = staging()
    run.state.evaluations.current = Evaluation(
        version=1, final=False, to_draw=[], publication_id=10, started=True
    )
    weight_updates.update(run)
    assert [type(command) for command in run.out] == [c.StageWeights]
    staged(run)
    weight_updates.update(run)
    assert len(run.out) == 1, "the evaluation is not over"
