"""What engines launch and load independently equals a slow walk over everything, one
engine at a time.

The core walks over all engines at each event: it computes once what they decide
together, and checks only those with capacity.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core import weights
from rollweave.core.mechanisms.lengths.index import work_of
from rollweave.core.mechanisms.versions import binding as version_affinity
from rollweave.core.mechanisms.versions.binding import batch_of, weights_of
from rollweave.core.policy.modes import acceptable
from rollweave.core.run import Run
from rollweave.core.state import Engine, EngineStatus, Stage
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.work import Purpose
from tests.support.hand import decoupled_config
from tests.support.properties import examples
from tests.support.random_world import World


class CheckedWorld(World):
    """After each event every answer is compared with the slow one."""

    comparisons_made = 0

    def feed(self, event: e.Event) -> None:
        super().feed(event)
        run = self.core._run
        if not run.pacing.interchangeable:
            compare(run)
            self.comparisons_made += 1


def compare(run: Run) -> None:
    engines = run.state.engines
    assert {one: version_affinity.batch_size(run, engine) for one, engine in engines.items()} == {
        one: slow_batch(run, engine) for one, engine in engines.items()
    }
    assert {
        one: version_affinity.wanted_weights(run, engine) for one, engine in engines.items()
    } == {one: slow_wanted_weights(run, engine) for one, engine in engines.items()}
    ready = (EngineStatus.STALE, EngineStatus.SERVING)
    first = next(
        (
            (engine, slow_wanted_weights(run, engine))
            for engine in engines.values()
            if engine.status in ready
            and not (engine.leaving or engine.draining)
            and slow_wanted_weights(run, engine) is not None
        ),
        None,
    )
    assert next(iter(version_affinity.updates(run)), None) == first
    assert version_affinity.free_capacity(run) == slow_seats(run)
    for purpose in (Purpose.TRAIN, Purpose.EVAL):
        assert version_affinity.engine_for(run, purpose) is slow_engine_for(run, purpose)
    known = {
        *run.state.publication.retained,
        *run.state.publication.checkpointed,
        *(engine.publication_id for engine in engines.values()),
    }
    assert all(
        version_affinity.is_loaded_or_loading(run, one) == slow_somewhere(run, one) for one in known
    )


def slow_batch(run: Run, engine: Engine) -> int:
    rollout = run.config.rollout
    share = -(-rollout.max_running // len(run.state.engines))
    return max(1, min(version_affinity.BATCH_PER_SLOT * engine.abilities.max_slots, share))


def slow_residents(run: Run, engine: Engine) -> int:
    under_way = (Stage.QUEUED, Stage.INIT, Stage.RUN)
    return sum(
        work_of(run, one).assigned_engine == engine.id and one.stage in under_way
        for one in run.state.trajectories.values()
    )


def begins(engine: Engine) -> bool:
    return engine.status is EngineStatus.SERVING and not (engine.leaving or engine.draining)


def slow_begins(run: Run, engine: Engine) -> bool:
    if not begins(engine) or not acceptable(engine.version, run.next_version(), run.mode.window):
        return False
    if batch_of(run, engine).launched < slow_batch(run, engine):
        return True
    newest = engine.publication_id in (
        run.state.publication.id,
        weights.newest(run, engine),
    )
    return newest and slow_other(run, engine) is None


def slow_seats(run: Run) -> int:
    free = 0
    for engine in run.state.engines.values():
        if slow_begins(run, engine):
            free += max(0, slow_batch(run, engine) - slow_residents(run, engine))
    alive = len(run.state.pools.init) + len(run.state.pools.run) + len(run.state.pools.closing)
    return max(0, min(free, run.config.rollout.max_running - alive))


def slow_engine_for(run: Run, purpose: Purpose) -> Engine | None:
    best: Engine | None = None
    least = 1.0
    evaluation = run.state.evaluations.current
    for engine in run.state.engines.values():
        fullness = slow_residents(run, engine) / slow_batch(run, engine)
        if purpose is Purpose.EVAL:
            may = (
                evaluation is not None
                and begins(engine)
                and engine.publication_id == evaluation.publication_id
            )
        else:
            may = slow_begins(run, engine)
        if may and fullness < least:
            best, least = engine, fullness
    return best


def slow_somewhere(run: Run, publication_id: int) -> bool:
    for engine in run.state.engines.values():
        loading = engine.status is EngineStatus.LOADING
        if (
            not engine.draining
            and (engine.loading.id if loading else engine.publication_id) == publication_id
        ):
            return True
    return False


def slow_other(run: Run, engine: Engine) -> int | None:
    """Weights that are waited for and that no engine has, the evaluation's first, if
    the engine can load them.
    """
    state = run.state
    waiting = sorted(
        weights_of(run, one)
        for one in state.trajectories.values()
        if one.id in state.mechanisms["versions"].unassigned
        and work_of(run, one).assigned_engine is None
        and one.stage in (Stage.INIT, Stage.RUN)
    )
    for one in [
        *(
            [state.evaluations.current.publication_id]
            if state.evaluations.current is not None
            else []
        ),
        *waiting,
    ]:
        if weights.is_obtainable(run, one) and not slow_somewhere(run, one):
            return one if weights.is_loadable(run, engine, one) else None
    return None


def slow_wanted_weights(run: Run, engine: Engine) -> int | None:
    state = run.state
    moving = any(
        engine.id in (m.source, m.target)
        for m in state.mechanisms["placement"].migrations.open.values()
    )
    if slow_residents(run, engine) or moving or slow_holds(run, engine):
        return None
    other, newest = slow_other(run, engine), weights.newest(run, engine)
    if other is not None:
        return other
    if newest is None or newest == engine.publication_id:
        return None
    is_unused = engine.status is EngineStatus.SERVING and batch_of(run, engine).launched == 0
    return None if is_unused and engine.since >= state.publication.at else newest


def slow_holds(run: Run, engine: Engine) -> bool:
    state, evaluation = run.state, run.state.evaluations.current
    if evaluation is None or engine.publication_id != evaluation.publication_id:
        return False
    if any(one.publication_id == evaluation.publication_id for one in before(run, engine.id)):
        return False
    queued = [state.groups[state.trajectories[member].group_id] for member in state.pools.queued]
    undrawn = any(state.groups[group_id].task is None for group_id in evaluation.pending)
    return bool(
        not evaluation.started
        or evaluation.to_draw
        or undrawn
        or any(group.purpose is Purpose.EVAL for group in queued)
    )


def before(run: Run, engine_id: EngineId) -> list[Engine]:
    engines = list(run.state.engines.values())
    return engines[: [engine.id for engine in engines].index(engine_id)]


@settings(max_examples=examples(25))
@given(
    seed=st.integers(0, 10_000),
    engines=st.integers(1, 5),
    batch=st.sampled_from([1, 3, 12]),
    relays=st.sampled_from([0, 2]),
    bound=st.sampled_from([None, 1]),
    failure=st.sampled_from([0.0, 0.05]),
)
def test_engines_decide_together_as_they_would_one_by_one(
    seed: int, engines: int, batch: int, relays: int, bound: int | None, failure: float
) -> None:
    config = decoupled_config(
        engines,
        rollout={
            "groups_per_step": 2,
            "group_size": 2,
            "max_running": batch * engines,
            "alpha": bound,
        },
        steps=3,
        eval={"every": 2, "episodes": 2, "final_episodes": 2},
        run={"checkpoint_every": 1},
        watchdog={
            "turn_s": 60.0,
            "train_s": 600.0,
            "restarts": 50,
        },
        weights={"relays": min(relays, engines)},
    )
    world = CheckedWorld(config, seed, failure=failure, spread=2.0)
    world.run()
    assert world.comparisons_made > 10
