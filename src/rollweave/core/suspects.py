"""The turns of an engine whose process is lost: which of them are suspects, and which
one is to blame (`core/policy/suspicion`).

Invariants: at most one attempt ends for the loss of an engine; the loss of an engine
counts as its own failure only once none of its turns can be to blame for it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rollweave.core import attempts, dispatching, trajectories, turns
from rollweave.core.policy.suspicion import MOST_SUSPECTS
from rollweave.core.run import Run
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


class Verdict(NamedTuple):
    """The result for the turns of a lost engine: the earlier suspicion of the turn that
    is to blame, None if no turn is, and the number of new suspects.
    """

    former: Suspicion | None = None
    accused: int = 0


def lose_turns(run: Run, engine: Engine, error: str, *, abort: bool) -> Verdict:
    """Fail every turn on an engine whose process is lost, as `turns.fail_all` does.

    If the engine was computing, its newest turns are suspects from now on; a turn that
    was a suspect before is to blame, and its attempt ends.
    """
    computing = engine.status in (EngineStatus.SERVING, EngineStatus.SUSPENDING)
    if not computing or engine.lender:  # a loan may end at any moment
        turns.fail_all(run, engine, error, abort=abort)
        return Verdict()
    suspicion = Suspicion(engine=engine.id, epoch=engine.epoch)
    newest = sorted(_computed(run, engine), key=lambda one: _given_at(one.open_turn), reverse=True)
    late = list(_late(run, engine))
    guilty = next((one for one in (*newest, *late) if one.open_turn.suspicion is not None), None)
    former = None if guilty is None else guilty.open_turn.suspicion
    if guilty is not None and former is not None:
        _convict(run, guilty, former, engine)
    for trajectory in newest[:MOST_SUSPECTS]:
        if trajectory is not guilty:
            _accuse(run, trajectory, engine, suspicion, error, abort=abort)
    for trajectory in late:
        if trajectory is not guilty and trajectory.open_turn.suspicion is None:
            trajectory.open_turn.suspicion = suspicion
            if isinstance(trajectory.open_turn.place, Queued):
                _queue_again(run, trajectory, trajectory.open_turn)
    turns.fail_all(run, engine, error, abort=abort)
    return Verdict(former, sum(turn.suspicion == suspicion for _, turn in _open_turns(run)))


def _open_turns(run: Run) -> Iterator[tuple[Trajectory, Turn]]:
    for trajectory_id in run.state.pools.run:
        trajectory = run.state.trajectories[trajectory_id]
        if trajectory.turn is not None:
            yield trajectory, trajectory.turn


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
    error: str,
    *,
    abort: bool,
) -> None:
    """Make a turn that the lost engine has a suspect, and take it from the engine."""
    turn = trajectory.open_turn
    turn.suspicion = turn.suspicion or suspicion
    if turn.prefill is not None:  # its own engine is another one
        turns.recall(run, trajectory, turn)
        dispatching.enqueue(run, trajectory, turn)
        return
    if abort:
        attempts.abort(run, trajectory, turn)
    turns.fail(run, trajectory, engine, error)


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
