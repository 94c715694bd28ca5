"""Turns that end their engines: one of the turns of a lost engine may be the reason for
the loss, and would end the next engine, too.

After the first loss a turn is a suspect. A suspect runs once more, alone on an engine
that has finished its other turns. So if that engine is lost as well, it is known which
turn is to blame, and a turn that was near it by chance is cleared by its answer. Only
few engines run suspects at a time, and the others take turns as usual.

Invariants: at most one attempt ends for the loss of an engine; the loss of an engine
counts as its own failure only once none of its turns can be to blame for it; an engine
that runs a suspect has no other turn.
"""

from collections.abc import Container, Iterable, Iterator

from rollweave.core import attempts, dispatching, trajectories, turns
from rollweave.core.policy.routing import EngineLoad
from rollweave.core.run import EngineFailure, EngineMove, Mechanism, Run, TurnMove
from rollweave.core.state import Engine, EngineStatus, OnEngine, Queued, Suspicion, Trajectory, Turn
from rollweave.schema.base import EngineId
from rollweave.schema.work import StopReason

MOST_SUSPECTS = 16
"""Maximum number of suspects of one loss, the newest turns of the engine: a turn that
ends an engine has rarely been there for long.
"""

SHARE = 4
"""One in `SHARE` engines may run a suspect at a time; one engine always may."""

MOST_EXCUSED = 8
"""Maximum number of losses of an engine in a row, without a finished turn in between,
that count as a turn's fault although no other engine was lost with the turn. Further
losses are the engine's own failures.
"""


def may_isolate(*, isolating: int, engines: int) -> bool:
    """True if one more of `engines` engines may run a suspect."""
    return isolating < max(1, engines // SHARE)


def engine_for_suspect(
    engines: Iterable[EngineLoad], *, avoid: Container[EngineId], isolating: Container[EngineId]
) -> EngineId | None:
    """Return the engine for a suspect, which begins once this engine is empty; None to
    keep the suspect waiting for an engine.

    The engines `avoid` were lost with the suspect: they are a last resort, since the
    loss of another engine is better evidence. Engines that also serve users are a last
    resort, too. Among the others, the engine with the fewest turns is empty first.
    """
    known = list(engines)
    dedicated = [engine for engine in known if not engine.borrowed] or known
    wanted = [engine for engine in dedicated if engine.id not in avoid] or dedicated
    free = [engine for engine in wanted if engine.id not in isolating]
    return min(free, key=lambda engine: (engine.active, engine.tokens)).id if free else None


def excuses(*, elsewhere: bool, excused: int) -> bool:
    """True if the loss of an engine, for which a turn is to blame, is not a failure of
    the engine. With `elsewhere`, another engine was lost with this turn before.
    `excused` counts the losses for which turns were blamed since the engine last
    finished a turn.
    """
    return elsewhere or excused < MOST_EXCUSED


# The loss of an engine.


def on_failed(run: Run, engine: Engine, failure: EngineFailure) -> None:
    """Excuse the failed engine if one of its turns is, or may be, to blame.

    If the engine was computing, its newest turns are suspects from now on; a turn that
    was a suspect before is to blame, and its attempt ends.
    """
    computing = engine.status in (EngineStatus.SERVING, EngineStatus.SUSPENDING)
    if not computing or engine.lender:  # a loan may end at any moment
        return
    suspicion = Suspicion(engine=engine.id, epoch=engine.epoch)
    newest = sorted(
        _computed(run, engine), key=lambda trajectory: _given_at(trajectory.open_turn), reverse=True
    )
    late = list(_late(run, engine))
    guilty = next(
        (
            trajectory
            for trajectory in (*newest, *late)
            if trajectory.open_turn.suspicion is not None
        ),
        None,
    )
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
    """Yield the trajectories whose open turns have timed out on the engine since it
    last answered a turn: the engine may have hung because of them.
    """
    for trajectory_id, number in engine.failures.unanswered.items():
        trajectory = run.state.trajectories.get(trajectory_id)
        turn = None if trajectory is None else trajectory.turn
        if trajectory is not None and turn is not None and turn.number == number:
            elsewhere = not isinstance(turn.place, OnEngine) or turn.place.engine != engine.id
            if elsewhere:
                yield trajectory


def _accuse(
    run: Run, trajectory: Trajectory, engine: Engine, suspicion: Suspicion, failure: EngineFailure
) -> None:
    """Make a suspect of a turn that the lost engine has, and take the turn from the
    engine.
    """
    turn = trajectory.open_turn
    turn.suspicion = turn.suspicion or suspicion
    if turn.prefill is not None:  # its own engine is not lost
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


# Engines for suspects.


def start_suspects(run: Run) -> None:
    """Give suspects to engines that are empty, and keep engines empty for others."""
    state = run.state
    for trajectory_id in list(state.turns.suspects):
        trajectory = state.trajectories[trajectory_id]
        turn = trajectory.open_turn
        engine = _engine_for_suspect(run, trajectory, turn)
        if engine is None or engine.active:
            continue
        del state.turns.suspects[trajectory_id]
        dispatching.give(run, trajectory, turn, engine)


def _engine_for_suspect(run: Run, trajectory: Trajectory, turn: Turn) -> Engine | None:
    """Return the engine that runs this turn alone, now or once the engine is empty."""
    engines, loads = run.state.engines, run.chooser.candidates(run, trajectory, turn)
    isolating = {
        engine.id: engine for engine in engines.values() if engine.failures.isolates is not None
    }
    own = next(
        (engine for engine in isolating.values() if engine.failures.isolates == trajectory.id), None
    )
    if own is not None and any(load.id == own.id for load in loads):
        return own
    if own is not None:  # it takes no turns for a while, or has other weights
        attempts.open_again(run, own)
        del isolating[own.id]
    if not may_isolate(isolating=len(isolating), engines=len(run.fleet.loads)):
        return None
    chosen = engine_for_suspect(loads, avoid=turn.avoid, isolating=isolating)
    if chosen is None:
        return None
    engine = engines[chosen]
    engine.failures.isolates = trajectory.id
    run.fleet_changed()
    dispatching.requeue_from(run, engine)
    return engine


def check(run: Run) -> None:
    """Assert that a suspect is alone on its engine, that an engine is kept only for a
    suspect that waits for it, and that losses in doubt belong to the engine's earlier
    processes.
    """
    state = run.state
    for engine in state.engines.values():
        for name in engine.active:
            turn = state.trajectories[name].open_turn
            if turn.suspicion is not None and engine.failures.isolates == name:
                assert list(engine.active) == [name], engine
        isolated = engine.failures.isolates
        assert isolated is None or isolated in {**engine.active, **state.turns.suspects}, engine
    kept = [
        engine.failures.isolates
        for engine in state.engines.values()
        if engine.failures.isolates is not None
    ]
    assert len(kept) == len(set(kept)), f"two engines are for one suspect: {kept}"
    for engine in run.state.engines.values():
        for epoch, count in engine.failures.doubted.items():
            suspicion = Suspicion(engine=engine.id, epoch=epoch)
            turns_ = [run.state.trajectories[member].turn for member in run.state.pools.run]
            open_ = sum(turn is not None and turn.suspicion == suspicion for turn in turns_)
            assert epoch < engine.epoch, engine
            assert open_ <= count, f"{engine} doubts fewer turns than are suspects"


MECHANISM = Mechanism(
    name="suspects",
    used=lambda _: True,  # any engine may be lost
    follows={
        EngineMove.FAILED: on_failed,
        EngineMove.SOUGHT: start_suspects,
        TurnMove.ACQUITTED: acquit,
    },
    check=check,
)
