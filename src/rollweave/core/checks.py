"""Invariants of the whole state. Tests check them after every event; production code never does."""

from rollweave.core.account import account
from rollweave.core.fleet import Fleet
from rollweave.core.run import Run
from rollweave.core.state import GroupStatus, Stage
from rollweave.policy.staleness import acceptable
from rollweave.schema.work import Purpose


def check(run: Run) -> None:
    assert run.fleet == Fleet.of(run.state), "the fleet is what a fresh count gives"
    _check_indices(run)
    _check_turns(run)
    _check_groups(run)
    _check_bounds(run)
    books = account(run.state)
    assert books.balanced, f"unaccounted trajectories: {books}"


def _check_indices(run: Run) -> None:
    state = run.state
    indices = {
        Stage.QUEUED: state.init_queue,
        Stage.INIT: state.in_init,
        Stage.RUN: state.in_run,
        Stage.EVAL_QUEUED: state.eval_queue,
        Stage.EVAL: state.in_eval,
        Stage.CLOSING: state.closing,
    }
    for stage, index in indices.items():
        found = {trajectory.id for trajectory in state.trajectories.values() if trajectory.stage is stage}
        assert found == set(index), f"index of {stage}: {set(index) ^ found} differ"
    for trajectory in state.trajectories.values():
        assert trajectory.id in state.groups[trajectory.group_id].members
        assert (trajectory.stage is Stage.CLOSING) == (trajectory.closing is not None), trajectory
        assert (trajectory.stage is Stage.SCORED) <= (trajectory.reward is not None), trajectory


def _check_turns(run: Run) -> None:
    state = run.state
    for trajectory in state.trajectories.values():
        turn = trajectory.turn
        queued = trajectory.id in state.turn_queue
        holders = [engine.id for engine in state.engines.values() if trajectory.id in engine.active]
        if turn is None:
            assert not queued, trajectory
            assert not holders, trajectory
        else:
            assert trajectory.stage is Stage.RUN, trajectory
            assert holders == ([] if turn.engine is None else [turn.engine]), (trajectory, holders)
            assert queued == (turn.engine is None), trajectory
    for engine in state.engines.values():
        assert len(engine.active) <= max(engine.max_slots, 0), engine


def _check_groups(run: Run) -> None:
    state = run.state
    training = [group for group in state.groups.values() if group.purpose is Purpose.TRAIN]
    active = {group.id for group in training if group.status in (GroupStatus.DRAWING, GroupStatus.ACTIVE)}
    assert active == set(state.active_groups)
    assert {group.id for group in training if group.status is GroupStatus.BUFFERED} == set(state.buffer)
    assert {group.id for group in training if group.status is GroupStatus.TAKEN} == set(state.trainer.taken)
    in_lineage = [group_id for groups in state.lineage.values() for group_id in groups]
    assert len(in_lineage) == len(set(in_lineage)), "a group was trained twice in one lineage"
    assert {group.id for group in training if group.status is GroupStatus.TRAINED} == set(in_lineage)
    for group in training:
        assert len(group.chosen) <= run.group_sizes[group.name], group
        if group.status is GroupStatus.BUFFERED and state.swept_at == run.next_version():
            for member in group.chosen:
                assert acceptable(state.trajectories[member].initiated, run.next_version(), run.mode.window), group


def _check_bounds(run: Run) -> None:
    state, rollout = run.state, run.config.rollout
    assert len(state.in_init) <= rollout.init_slots
    assert len(state.in_init) + len(state.in_run) <= rollout.max_running
    assert len(state.in_eval) <= rollout.eval_slots
