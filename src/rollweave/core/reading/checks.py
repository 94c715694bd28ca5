"""Invariants of the whole state.

Tests check them after every event, or after every few; production code never does.
"""

import math

import msgspec

from rollweave.core import attempts
from rollweave.core.fleet import Fleet
from rollweave.core.policy.experience import is_measured
from rollweave.core.policy.modes import acceptable
from rollweave.core.reading.status import account
from rollweave.core.run import Run
from rollweave.core.state import (
    ALIVE,
    EngineStatus,
    GroupStatus,
    Held,
    OnEngine,
    Phase,
    Queued,
    Requested,
    Stage,
    Suspected,
    TrainerStatus,
)
from rollweave.core.weights import MAX_VERSIONS, needed
from rollweave.schema.config.rollout import STARTED
from rollweave.schema.work import Purpose


def check(run: Run) -> None:
    assert run.fleet == Fleet.of(run.state), "the fleet is what a fresh count gives"
    _check_indices(run)
    _check_turns(run)
    _check_groups(run)
    _check_bounds(run)
    _check_service(run)
    _check_weights(run)
    _check_saving(run)
    _check_evaluations(run)
    _check_attempts(run)
    for mechanism in run.mechanisms:
        if mechanism.check is not None:
            mechanism.check(run)
    accounts = account(run.state)
    assert accounts.balanced, f"unaccounted trajectories: {accounts}"


def _check_indices(run: Run) -> None:
    state = run.state
    found = {stage: attempts.index_of(state, stage) for stage in Stage}
    indices = {stage: index for stage, index in found.items() if index is not None}
    assert not run.over, f"{run.over} are not settled"
    assert all(one.stage is not Stage.OVER for one in state.trajectories.values()), "OVER lasts"
    by_stage: dict[Stage, set[str]] = {stage: set() for stage in indices}
    for trajectory in state.trajectories.values():
        if trajectory.stage in by_stage:
            by_stage[trajectory.stage].add(trajectory.id)
        assert trajectory.id in state.groups[trajectory.group_id].members
        assert (trajectory.stage is Stage.CLOSING) == (trajectory.closing is not None), trajectory
        assert (trajectory.stage is Stage.SCORED) <= (trajectory.reward is not None), trajectory
    for stage, index in indices.items():
        assert by_stage[stage] == index.keys(), (
            f"index of {stage}: {index.keys() ^ by_stage[stage]} differ"
        )


def _check_turns(run: Run) -> None:
    state = run.state
    waiting, suspects = set(state.turns.queue), set(state.turns.suspects)
    served: dict[str, str] = {}  # trajectory → the engine that has its turn
    prompts: dict[str, str] = {}  # trajectory → the prefill engine that has its prompt
    for engine in state.engines.values():
        preempts = engine.samples and run.scheduling.preempts and engine.abilities.preempts
        assert preempts or len(engine.active) <= max(engine.abilities.max_slots, 0), engine
        table = served if engine.samples else prompts
        for trajectory_id in engine.active:
            assert trajectory_id not in table, (
                f"{trajectory_id} is on {table[trajectory_id]} and {engine.id}"
            )
            table[trajectory_id] = engine.id
    for trajectory in state.trajectories.values():
        turn = trajectory.turn
        if turn is None:
            continue
        assert trajectory.stage is Stage.RUN, trajectory
        assert prompts.pop(trajectory.id, "") == (turn.prefill or ""), trajectory
        match turn.place:
            case Queued():
                waiting.remove(trajectory.id)
            case Suspected():
                assert turn.suspicion is not None, trajectory
                suspects.remove(trajectory.id)
            case OnEngine(engine=engine_id):
                assert served.pop(trajectory.id, None) == engine_id, trajectory
            case Held():
                pass
            case Requested():
                raise AssertionError(f"{trajectory} has a turn without a place")
    places = [state.trajectories[member].open_turn.place for member in state.turns.queue]
    for engine in state.engines.values():
        counted = sum(isinstance(one, Queued) and one.engine == engine.id for one in places)
        assert run.turn_queues.count(engine.id) == counted, f"turns that wait for {engine.id}"
    assert not waiting, f"{waiting} are queued without an open turn"
    assert not suspects, f"{suspects} are suspects without an open turn"
    assert not served, f"{served} are on engines without an open turn"
    assert not prompts, f"{prompts} are on prefill engines, and no turn waits for them"


def _check_groups(run: Run) -> None:
    state = run.state
    training = [group for group in state.groups.values() if group.purpose is Purpose.TRAIN]
    by_status: dict[GroupStatus, set[str]] = {status: set() for status in GroupStatus}
    for group in training:
        by_status[group.status].add(group.id)
    assert (
        by_status[GroupStatus.DRAWING]
        | by_status[GroupStatus.ACTIVE]
        | by_status[GroupStatus.COMPARING]
        == state.drawing.active.keys()
    )
    assert by_status[GroupStatus.BUFFERED] == state.buffer.keys()
    assert by_status[GroupStatus.TAKEN] == set(state.trainer.batch)
    _check_measured(run)
    in_lineage = [group_id for groups in state.checkpoints.lineage.values() for group_id in groups]
    assert len(in_lineage) == len(set(in_lineage)), "a group was trained twice in one lineage"
    assert by_status[GroupStatus.TRAINED] == set(in_lineage)
    version = run.next_version()
    for group in training:
        assert len(group.chosen) <= run.group_sizes[group.name], group
    for group_id in state.buffer if state.drawing.swept_for_version == version else ():
        for member in state.groups[group_id].chosen:
            assert acceptable(state.trajectories[member].origin, version, run.mode.window), group_id


def _check_measured(run: Run) -> None:
    """Assert that groups are measured only if the strategy chooses by what is measured,
    and that the trainer does nothing else then.
    """
    trainer = run.state.trainer
    assert (trainer.status is TrainerStatus.MEASURING) == bool(trainer.measuring), trainer
    assert len(trainer.measuring) == len(set(trainer.measuring)), trainer
    assert not (trainer.measuring and trainer.batch), trainer
    name = run.config.buffer.sample
    measures = is_measured(run.rules.get(name, name))
    assert measures or not trainer.measuring, trainer
    for group in run.state.groups.values():
        if group.measures is not None:
            assert measures, group
            assert all(
                value is None or 0 <= value < math.inf
                for value in msgspec.structs.astuple(group.measures)
            ), group


def _check_weights(run: Run) -> None:
    """Assert that the weights of engines are known, and that engines are on hosts that
    are up.
    """
    state = run.state
    assert len(needed(run)) <= MAX_VERSIONS
    for engine in state.engines.values():
        assert engine.staging.staged_id < 0 or engine.staging.staged_id > engine.publication_id, (
            engine
        )
        assert engine.staging.id < 0 or engine.status is not EngineStatus.STARTING, engine
        assert run.colocated or not engine.released, engine
    assert not state.publication.checkpointed or (
        state.checkpoints.newest is not None
        and max(state.publication.checkpointed.values()) <= state.checkpoints.newest
    ), state.publication.checkpointed
    for engine in state.engines.values():
        assert engine.seat.host in state.hosts.up or state.serving, (
            f"{engine.id} is on a host that was given up"
        )


def _check_saving(run: Run) -> None:
    trainer = run.state.trainer
    drains = any(engine.draining for engine in run.state.engines.values())
    saves = trainer.saving is not None or drains  # whose places are for further ranks
    assert trainer.status is not TrainerStatus.SAVING or saves, trainer
    assert not trainer.save_pending or trainer.status is TrainerStatus.SAVING, trainer
    assert trainer.saving is None or trainer.saving <= run.state.checkpoints.newest_requested, (
        trainer
    )


def _check_evaluations(run: Run) -> None:
    evaluations = run.state.evaluations
    assert evaluations.current is None or evaluations.suspended is None, evaluations
    for evaluation in (evaluations.current, evaluations.suspended):
        pending = evaluation.pending if evaluation is not None else ()
        assert run.state.groups.keys() >= set(pending), evaluation


def _check_attempts(run: Run) -> None:
    """Assert that every attempt that was launched is under way, or has ended with one
    stop reason.
    """
    state, counters = run.state, run.state.counters
    under_way = sum(one.launched for one in state.trajectories.values())
    over = sum(counters.stop_reasons.values())
    assert counters.attempts == over + under_way, (
        f"{counters.attempts} attempts, {over} over, {under_way} under way"
    )
    for one in state.trajectories.values():
        assert one.past.kept is None or one.stage is Stage.QUEUED, one
    if not state.serving:
        started = counters.started + counters.eval_started + counters.relaunched
        assert counters.attempts == started, (
            f"{counters.attempts} attempts, {started} started: {counters}"
        )


def _check_service(run: Run) -> None:
    """Assert that every submitted rollout is delivered or under way."""
    state, over = run.state, (Stage.SCORED, Stage.ENDED)
    submitted = [
        one
        for one in state.trajectories.values()
        if state.groups[one.group_id].purpose is Purpose.SERVE
    ]
    under_way = sum(one.stage not in over for one in submitted)
    assert state.counters.submitted == sum(state.counters.delivered.values()) + under_way, (
        state.counters
    )


def _check_bounds(run: Run) -> None:
    """Assert that no pool holds more attempts than it has places, that no place is free
    for which an attempt waits with its environment, and that in mode decoupled none
    waits so.
    """
    places, taken, pools = run.places, attempts.taken(run), run.state.pools
    assert taken.init <= places.init, f"INIT: {taken} of {places}"
    assert taken.init + taken.ready <= STARTED * places.init, f"ready: {taken} of {places}"
    assert taken.run <= places.run, f"RUN: {taken} of {places}"
    assert taken.eval <= places.eval, f"EVAL: {taken} of {places}"
    assert taken.alive <= places.alive, f"environments: {taken} of {places}"
    idle = run.state.phase is not Phase.FINISHED and taken.run < places.run
    assert not (pools.run_queued and idle), f"RUN has room: {taken} of {places}"
    assert run.pacing.interchangeable or not pools.run_queued, pools.run_queued
    assert pools.closing.keys().isdisjoint(pools.run_queued), "closing attempts wait for nothing"
    assert all(stage in ALIVE for stage in pools.closing.values()), pools.closing
