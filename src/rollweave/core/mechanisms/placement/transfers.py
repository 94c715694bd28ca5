"""Transfers of KV between engines: of trajectories that migrate, and of prompts that
one engine computes for another.

Invariants: a trajectory has at most one migration, and an engine is in at most one
transfer, apart from transfers of prompts. A turn requested during a transfer waits for
the transfer's end (the exposed time of migration); a turn requested before the transfer
begins cancels it. After any failure the trajectory has an engine: the engine that holds
its KV, or an engine that computes the KV again. Trajectories whose turn need no longer
wait are returned, and `core/dispatching` queues the turns.

When a prompt's KV moves, the turn is on the target already, and begins there
afterwards.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from rollweave.core import attempts, dispatching
from rollweave.core.mechanisms.lengths.index import reindex, work_of
from rollweave.core.mechanisms.placement import assignment
from rollweave.core.mechanisms.placement.assignment import Migration, Placement, migration_of
from rollweave.core.run import Run, TurnMove
from rollweave.core.state import Engine, EngineStatus, Held, Trajectory, Turn
from rollweave.schema.base import EngineId, Struct
from rollweave.schema.commands import Migrate
from rollweave.schema.events import MigrationDone, WorldLost


class Request(Struct, frozen=True, kw_only=True):
    """A pending migration.

    `length` is the predicted length, by which requests are served.
    """

    number: int
    length: float
    source: EngineId
    target: EngineId


def transfer_epoch(requests: Sequence[Request], busy: Collection[EngineId]) -> list[Request]:
    """Return the requests to start now: longest first, no engine in two transfers at
    the same time. `busy` engines are in a transfer already.
    """
    taken = dict.fromkeys(busy)
    chosen = []
    for request in sorted(requests, key=lambda request: (-request.length, request.number)):
        if request.source not in taken and request.target not in taken:
            taken |= {request.source: None, request.target: None}
            chosen.append(request)
    return chosen


PROMPTS_AT_ONCE = 3
"""Maximum number of transfers of prompts in which an engine takes part: most of the
time, they wait for the end of a step. An engine accepts four at the same time
(`engine/exchange`).
"""

MEMORY = 0.2
"""Weight of a new transfer in the mean seconds for a token's KV."""

TRANSFER_S = 30.0
"""Maximum seconds of a transfer before it is given up: far more than the largest
contexts need over a slow link.
"""


def can_take(source: Engine, target: Engine) -> bool:
    """True if both engines serve the same weights: KV is valid only under the weights
    that computed it.
    """
    serving = (
        source.status is EngineStatus.SERVING
        and target.status is EngineStatus.SERVING
        and not target.draining
    )
    return serving and source.publication_id == target.publication_id


def begin(run: Run) -> list[Trajectory]:
    """Begin the transfers whose engines are in no other transfer. Between engines that
    cannot move KV, a trajectory moves immediately, and its KV is computed again. Return
    the trajectories whose turns wait no longer, including trajectories whose transfer
    was given up.
    """
    migrations, released = run.part(Placement).migrations.open, list[Trajectory]()
    for m in [m for m in migrations.values() if m.since is None]:
        source, target = run.state.engines.get(m.source), run.state.engines.get(m.target)
        # it has changed while the migration waited
        if source is None or target is None or not can_take(source, target):
            if m.vacates or m.prompt:
                released += _settle(run, m, 0, "an engine has changed")
                continue
            forget(run, run.state.trajectories[m.trajectory_id])
        elif not (source.abilities.moves_kv and target.abilities.moves_kv):
            released += _settle(run, m, 0, "")
    for m in _next_transfers(run):
        m.since = run.now
        run.emit(
            Migrate(
                number=m.number,
                trajectory_id=m.trajectory_id,
                attempt=m.attempt,
                source=m.source,
                target=m.target,
            )
        )
    return released


def _next_transfers(run: Run) -> list[Migration]:
    """Return the planned transfers that begin now: transfers of trajectories as in
    Heddle's epochs, transfers of prompts in their order, up to `PROMPTS_AT_ONCE` for
    each engine.
    """
    migrations = run.part(Placement).migrations.open
    begun = [m for m in migrations.values() if m.since is not None]
    waiting = [m for m in migrations.values() if m.since is None]
    requests = [
        Request(
            number=m.number,
            length=work_of(run, run.state.trajectories[m.trajectory_id]).estimate,
            source=m.source,
            target=m.target,
        )
        for m in waiting
        if not m.prompt
    ]
    busy = [end for m in begun if not m.prompt for end in (m.source, m.target)]
    chosen = [migrations[request.number] for request in transfer_epoch(requests, busy)]
    prompts = Counter(end for m in begun if m.prompt for end in (m.source, m.target))
    for m in waiting:
        if m.prompt and max(prompts[m.source], prompts[m.target]) < PROMPTS_AT_ONCE:
            prompts.update((m.source, m.target))
            chosen.append(m)
    return chosen


def vacate(run: Run, trajectory: Trajectory, source: EngineId, target: EngineId) -> None:
    """Move the trajectory to the target for good: its open turn, which no engine has,
    waits for its KV. The caller calls `begin` after calling this function for all
    trajectories that leave.
    """
    plan(run, trajectory, source, target).vacates = True


def carry_prompt(run: Run, trajectory: Trajectory, source: EngineId, target: EngineId) -> None:
    """Move the KV of the open turn's prompt, which the source has computed, to the
    engine that has the turn. The caller calls `begin`.
    """
    plan(run, trajectory, source, target).prompt = True


def plan(run: Run, trajectory: Trajectory, source: EngineId, target: EngineId) -> Migration:
    """Plan a migration in place of the one that the trajectory has, if any."""
    migrations = run.part(Placement).migrations
    forget(run, trajectory)
    number = migrations.next_number
    run.part(Placement).trajectories[trajectory.id] = number
    migrations.next_number += 1
    migrations.open[number] = Migration(
        number=number,
        trajectory_id=trajectory.id,
        attempt=trajectory.attempt,
        source=source,
        target=target,
    )
    return migrations.open[number]


def hold_turn(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Hold the turn that the trajectory now requests if it must wait for a transfer."""
    if holds_turn(run, trajectory):
        turn.place = Held()


def holds_turn(run: Run, trajectory: Trajectory) -> bool:
    """True if the turn that the trajectory now requests must wait for a transfer.

    A transfer that has not begun is dropped.
    """
    number = migration_of(run, trajectory)
    if number is None:
        return False
    migration = run.part(Placement).migrations.open[number]
    if migration.since is not None or migration.vacates:
        return True
    forget(run, trajectory)
    return False


def forget(run: Run, trajectory: Trajectory) -> None:
    """Cancel the trajectory's migration. A transfer under way ends by itself."""
    part = run.part(Placement)
    number = part.trajectories.pop(trajectory.id, None)
    if number is not None and part.migrations.open[number].since is None:
        del part.migrations.open[number]
        run.state.counters.scheduling.migrations_dropped += 1


def on_world_lost(run: Run, _event: WorldLost) -> None:
    """Forget all migrations: the engines are gone."""
    part = run.part(Placement)
    part.migrations.open.clear()
    part.trajectories.clear()


def on_done(run: Run, event: MigrationDone) -> None:
    """Queue the turns that have waited for the transfer."""
    dispatching.release(run, complete(run, event))


def complete(run: Run, event: MigrationDone) -> list[Trajectory]:
    """End a transfer that the world reports. Return the trajectories whose turns wait
    no longer.
    """
    m = run.part(Placement).migrations.open.get(event.number)
    if m is None or m.since is None:
        return []
    return _end(run, m, event.moved_tokens, event.error)


def check_late(run: Run) -> None:
    """Queue the turns that have waited for transfers that have taken too long."""
    dispatching.release(run, give_up_late(run))


def give_up_late(run: Run) -> list[Trajectory]:
    """Give up transfers that have taken too long. Return the trajectories whose turns
    wait no longer.
    """
    released = []
    for m in list(run.part(Placement).migrations.open.values()):
        if m.since is not None and run.now - m.since > TRANSFER_S:
            released += _end(run, m, 0, f"no answer within {TRANSFER_S:g} s")
    return released


def _end(run: Run, m: Migration, moved_tokens: int, error: str) -> list[Trajectory]:
    """End a transfer, and begin the transfers that waited for its engines."""
    return _settle(run, m, moved_tokens, error) + begin(run)


def _settle(run: Run, m: Migration, moved_tokens: int, error: str) -> list[Trajectory]:
    migrations, counted = run.part(Placement).migrations, run.state.counters.scheduling
    del migrations.open[m.number]
    if m.prompt:
        return _settle_prompt(run, m, moved_tokens, error)
    if error:
        run.warn(
            m.target,
            f"KV of {m.trajectory_id} did not come from {m.source}: {error}",
            count="migration_failed",
        )
        counted.migrations_failed += 1
    else:
        counted.migrations += 1
        counted.moved_tokens += moved_tokens
        if moved_tokens and m.since is not None:
            token_s = (run.now - m.since) / moved_tokens
            migrations.token_s += (MEMORY if migrations.token_s else 1.0) * (
                token_s - migrations.token_s
            )
    released = []
    trajectory = attempts.find(run, m.trajectory_id, m.attempt)
    if trajectory is not None and migration_of(run, trajectory) == m.number:
        del run.part(Placement).trajectories[trajectory.id]
        work_of(run, trajectory).assigned_engine = _engine_after(run, m, moved=not error)
        reindex(run, trajectory)
        if not run.pacing.interchangeable:
            # the target may have other weights by now
            assignment.queue_of(run, trajectory, ())
        if trajectory.turn is not None:
            counted.exposed_s += run.now - trajectory.turn.since
            released.append(trajectory)
    return released


def _settle_prompt(run: Run, m: Migration, moved_tokens: int, error: str) -> list[Trajectory]:
    """Settle the transfer of a prompt's KV, without which the target computes it."""
    trajectory = attempts.find(run, m.trajectory_id, m.attempt)
    if trajectory is None or migration_of(run, trajectory) != m.number:
        return []
    del run.part(Placement).trajectories[trajectory.id]
    if error:
        run.state.counters.scheduling.split_failed += 1
        if m.since is not None:
            run.warn(
                m.target,
                f"KV of {m.trajectory_id} did not come from {m.source}: {error}",
                count="prompt_failed",
            )
    else:
        target = run.state.engines[m.target]
        run.follow(TurnMove.CARRIED, trajectory, trajectory.open_turn, target, moved_tokens)
    return [trajectory]


def _engine_after(run: Run, m: Migration, *, moved: bool) -> EngineId | None:
    """The engine that holds the KV; else the engine at the other end; else None (any
    engine).

    A trajectory moved to free its source never returns to it.
    """
    if m.vacates:
        return m.target if assignment.is_usable(run, m.target) else None
    ends = (m.target, m.source) if moved else (m.source, m.target)
    return next((end for end in ends if assignment.is_usable(run, end)), None)


def check_prompt(run: Run, trajectory: Trajectory, source: EngineId, target: EngineId) -> None:
    """Assert that the KV of the trajectory's prompt moves between these engines."""
    number = migration_of(run, trajectory)
    assert number is not None, f"{trajectory} waits for no transfer"
    moving = run.part(Placement).migrations.open[number]
    assert moving.prompt, moving
    assert (moving.source, moving.target) == (source, target), trajectory


def check(run: Run) -> None:
    """Assert that an engine is in one transfer, and that each migration is a
    trajectory's.
    """
    part = run.part(Placement)
    for trajectory in run.state.trajectories.values():
        turn = trajectory.turn
        if turn is None or not isinstance(turn.place, Held):
            continue
        if turn.number or (trajectory.id not in part.held and trajectory.id not in part.ready):
            number = migration_of(run, trajectory)
            assert number is not None, f"{trajectory} waits for no transfer"
            moving = part.migrations.open[number]
            assert moving.since is not None or moving.vacates, trajectory
    for number, migration in part.migrations.open.items():
        moves = part.trajectories.get(migration.trajectory_id) == number
        assert moves or migration.since is not None, f"no trajectory is in {migration}"
    ends = [
        end
        for m in part.migrations.open.values()
        if m.since is not None and not m.prompt
        for end in (m.source, m.target)
    ]
    assert len(ends) == len(set(ends)), f"an engine is in two transfers: {ends}"
