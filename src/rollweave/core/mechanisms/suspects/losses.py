"""The loss of an engine: which of its turns become suspects, and which one is to blame.

Invariants: at most one attempt ends for the loss of an engine; the loss of an engine
counts as its own failure only once none of its turns can be to blame for it.
"""

from collections.abc import Iterator

from rollweave.core import attempts, dispatching, trajectories, turns
from rollweave.core.mechanisms.suspects.policy import MOST_SUSPECTS, excuses
from rollweave.core.run import EngineFailure, Run
from rollweave.core.state import (
    Engine,
    EngineStatus,
    OnEngine,
    Queued,
    Suspicion,
    Trajectory,
    Turn,
)
from rollweave.schema.work import StopReason


def on_failed(run: Run, engine: Engine, failure: EngineFailure) -> None:
    """Excuse the failed engine if one of its turns is, or may be, to blame.

    If the engine was computing, its newest turns are suspects from now on; a turn that
    was a suspect before is to blame, and its attempt ends.
    """
    computing = engine.status in (EngineStatus.SERVING, EngineStatus.SUSPENDING)
    if not computing or engine.lender:  # a loan may end at any moment
        return
    suspicion = Suspicion(engine=engine.id, epoch=engine.epoch)
    newest = sorted(_computed(run, engine), key=lambda one: _given_at(one.open_turn), reverse=True)
    late = list(_late(run, engine))
    guilty = next((one for one in (*newest, *late) if one.open_turn.suspicion is not None), None)
    former = None if guilty is None else guilty.open_turn.suspicion
    if guilty is not None and former is not None:
        _convict(run, guilty, former, engine)
    for trajectory in newest[:MOST_SUSPECTS]:
        if trajectory is not guilty:
            _accuse(run, trajectory, engine, suspicion, failure)
    for trajectory in late:
        if trajectory is not guilty and trajectory.open_turn.suspicion is None:
            trajectory.open_turn.suspicion = suspicion
            if isinstance(trajectory.open_turn.place, Queued):
                _queue_again(run, trajectory, trajectory.open_turn)
    accused = sum(turn.suspicion == suspicion for turn in _open_turns(run))
    failures = engine.failures
    if former is not None and excuses(
        elsewhere=former.engine != engine.id, excused=failures.excused
    ):
        failures.excused += 1
        failure.excused = True
    elif accused and failures.restarts <= run.config.watchdog.restarts:
        failures.doubted[engine.epoch] = accused
        failure.excused = True


def acquit(run: Run, _trajectory: Trajectory, turn: Turn) -> None:
    """Record the answer of a suspect. If the turn was the last suspect of an engine's
    loss, the loss was a failure of the engine itself.
    """
    suspicion = turn.suspicion
    assert suspicion is not None, "it is a suspect"
    lost = run.state.engines.get(suspicion.engine)
    if lost is None or suspicion.epoch not in lost.failures.doubted:
        return
    lost.failures.doubted[suspicion.epoch] -= 1
    if not lost.failures.doubted[suspicion.epoch]:
        del lost.failures.doubted[suspicion.epoch]
        lost.failures.restarts += 1


def _open_turns(run: Run) -> Iterator[Turn]:
    for trajectory_id in run.state.pools.run:
        turn = run.state.trajectories[trajectory_id].turn
        if turn is not None:
            yield turn


def _computed(run: Run, engine: Engine) -> Iterator[Trajectory]:
    """Yield the trajectories for which the engine computes a prompt or a turn; a turn
    whose prompt another engine computes is not one of them.
    """
    for trajectory_id in engine.active:
        trajectory = run.state.trajectories[trajectory_id]
        if trajectory.open_turn.prefill in (None, engine.id):
            yield trajectory


def _given_at(turn: Turn) -> float:
    """Return a number that grows with the time at which its engine got the turn or
    its prompt.
    """
    assert isinstance(turn.place, OnEngine), "an engine has it"
    return turn.place.given if turn.prefill is None else turn.since


def _late(run: Run, engine: Engine) -> Iterator[Trajectory]:
    """Yield the trajectories whose open turns have timed out there since the engine
    last answered one: it may have hung because of them.
    """
    for trajectory_id, number in engine.failures.unanswered.items():
        trajectory = run.state.trajectories.get(trajectory_id)
        turn = None if trajectory is None else trajectory.turn
        if trajectory is not None and turn is not None and turn.number == number:
            elsewhere = not isinstance(turn.place, OnEngine) or turn.place.engine != engine.id
            if elsewhere:
                yield trajectory


def _accuse(
    run: Run,
    trajectory: Trajectory,
    engine: Engine,
    suspicion: Suspicion,
    failure: EngineFailure,
) -> None:
    """Make a turn that the lost engine has a suspect, and take it from the engine."""
    turn = trajectory.open_turn
    turn.suspicion = turn.suspicion or suspicion
    if turn.prefill is not None:  # its own engine is another one
        turns.recall(run, trajectory, turn)
        dispatching.enqueue(run, trajectory, turn)
        return
    if not failure.lost:
        attempts.abort(run, trajectory, turn)
    turns.fail(run, trajectory, engine, failure.error)


def _convict(run: Run, guilty: Trajectory, former: Suspicion, engine: Engine) -> None:
    """End the attempt that is to blame for both losses. The other suspects of the first
    loss stay suspects: the lost engine may have had two such turns.
    """
    turn, group = guilty.open_turn, run.state.groups[guilty.group_id]
    assert group.task is not None, "its attempt has begun"
    text = (
        f"turn {turn.number} of {guilty.id}/{guilty.attempt}, at task {group.task.id} of "
        f"{group.name}, is given up: engines {former.engine} and {engine.id} were lost while they "
        "had it"
    )
    run.warn(guilty.id, text, count=StopReason.ENGINES_LOST)
    trajectories.cancel(run, guilty, StopReason.ENGINES_LOST, failure=text)
    first = run.state.engines.get(former.engine)
    if first is not None:
        first.failures.doubted.pop(former.epoch, None)


def _queue_again(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Move a turn between the queue and the suspects."""
    attempts.take_back(run, trajectory, turn)
    dispatching.enqueue(run, trajectory, turn)
