"""Migration of trajectories, with their KV, to the engine for their new rank, while
their environment works (Heddle §5.3).

Invariants: a trajectory has at most one migration, and an engine is in at most one
transfer, apart from those of prompts. A turn requested during a transfer waits for its
end (the exposed time of migration); one requested before it begins cancels it. After
any failure the trajectory has an engine: the one that holds its KV, or one that
computes it again. Trajectories whose turn need no longer wait are returned, and
`core/turns` queues the turns.

The KV of prompts moves in the same way from prefill engines (`core/phases`); their
turns are on the target already, where they then begin.
"""

from collections import Counter

from rollweave.core import assignment, attempts, phases
from rollweave.core.costs import rate_of
from rollweave.core.length_index import EngineWork
from rollweave.core.policy.migration import Request, transfer_epoch, worth_it
from rollweave.core.run import Run
from rollweave.core.state import Engine, EngineStatus, Migration, Trajectory
from rollweave.schema.base import EngineId
from rollweave.schema.commands import Migrate
from rollweave.schema.config.engines import BLOCK_TOKENS
from rollweave.schema.events import MigrationDone

UNEVEN = 1.25
"""Ratio of an engine's work to that of the least loaded one from which a trajectory
moves only to balance them: estimates err by about that.
"""

PROMPTS_AT_ONCE = 3
"""Maximum number of transfers of prompts in which an engine is: most of their time,
they wait for the end of a step. An engine takes four at once (`engine/exchange`).
"""

MEMORY = 0.2
"""Weight of a new transfer in the mean seconds for a token's KV."""

TRANSFER_S = 30.0
"""Maximum seconds of a transfer before it is given up: far more than the largest
contexts need over a slow link.
"""


def consider(run: Run, trajectory: Trajectory) -> list[Trajectory]:
    """Decide whether the trajectory, whose estimate has changed in a tool interval,
    should move. Return the trajectories whose turns wait no longer, as `begin` does.
    """
    if (
        run.scheduling.migration == "never"
        or trajectory.migration is not None
        or trajectory.assigned_engine is None
    ):
        return []
    if not assignment.is_usable(run, trajectory.assigned_engine):
        return []
    source = run.state.engines[trajectory.assigned_engine]
    if not source.moves_kv:
        return []
    target = _target(run, trajectory, source)
    if target is None:
        return []
    _plan(run, trajectory, source.id, target.id)
    return begin(run)


def _target(run: Run, trajectory: Trajectory, source: Engine) -> Engine | None:
    """Return the engine for the trajectory's rank; with migration by gain also the
    least loaded one, if the former does not pay and this one does. The source must be
    able to move KV.
    """
    by_rank = run.state.engines[assignment.engine_of_rank(run, trajectory)]
    if run.scheduling.migration == "rank":
        can_take = by_rank.moves_kv and _can_take(source, by_rank)
        return by_rank if by_rank is not source and can_take else None
    in_pool = assignment.pool_for(run, trajectory) is not None
    idlest = assignment.least_loaded(
        run, [engine.id for engine in assignment.usable(run, trajectory)] if in_pool else None
    )
    assert idlest is not None, "the source takes turns"
    uneven = assignment.work_s(run, source) > UNEVEN * assignment.work_s(run, idlest)
    for target in (by_rank, idlest) if uneven else (by_rank,):
        if (
            target is not source
            and target.moves_kv
            and _can_take(source, target)
            and _is_worthwhile(run, trajectory, source, target)
        ):
            return target
    return None


def _can_take(source: Engine, target: Engine) -> bool:
    """True if both engines serve the same weights: KV is valid only under the weights
    that computed it.
    """
    serving = (
        source.status is EngineStatus.SERVING
        and target.status is EngineStatus.SERVING
        and not target.draining
    )
    return serving and source.publication_id == target.publication_id


def _is_worthwhile(run: Run, trajectory: Trajectory, source: Engine, target: Engine) -> bool:
    own, other = (
        run.length_index.loads.get(source.id, EngineWork()),
        run.length_index.loads.get(target.id, EngineWork()),
    )
    left = next((-key[0] for key in own.remaining if key[1] != trajectory.id), 0)
    there = max(other.longest, trajectory.estimate)
    work, held = trajectory.estimate, trajectory.kv_token_steps
    transfer_s = trajectory.context_tokens * run.state.migrations.token_s
    return worth_it(
        _seconds(
            source,
            (own.longest, own.tokens, own.occupied),
            (left, own.tokens - work, own.occupied - held),
        ),
        _seconds(
            target,
            (other.longest, other.tokens, other.occupied),
            (there, other.tokens + work, other.occupied + held),
        ),
        exposed_s=max(0.0, transfer_s - (run.domain_of(trajectory).tool_s or 0.0)),
    )


def _seconds(engine: Engine, *loads: tuple[int, int, int]) -> tuple[float, float]:
    """Seconds until the engine's work is done, before the move and after it."""
    cost = rate_of(engine)
    before, after = (
        cost.seconds(longest=longest, tokens=tokens, occupied=held)
        for longest, tokens, held in loads
    )
    return before, after


def begin(run: Run) -> list[Trajectory]:
    """Begin the transfers whose engines are in no other one. Between engines that
    cannot move KV, a trajectory moves at once, and its KV is computed again.

    Return the trajectories whose turns wait no longer, among them those whose transfer
    was given up.
    """
    migrations, released = run.state.migrations.open, list[Trajectory]()
    for m in [m for m in migrations.values() if m.since is None]:
        source, target = run.state.engines.get(m.source), run.state.engines.get(m.target)
        # it has changed while the migration waited
        if source is None or target is None or not _can_take(source, target):
            if m.vacates or m.prompt:
                released += _settle(run, m, 0, "an engine has changed")
                continue
            attempts.forget_migration(run, run.state.trajectories[m.trajectory_id])
        elif not (source.moves_kv and target.moves_kv):
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
    """Return the planned transfers that begin now: trajectories' as in Heddle's epochs,
    prompts' in their order, as far as their engines are in few of them.
    """
    migrations = run.state.migrations.open
    begun = [m for m in migrations.values() if m.since is not None]
    waiting = [m for m in migrations.values() if m.since is None]
    requests = [
        Request(
            number=m.number,
            length=run.state.trajectories[m.trajectory_id].estimate,
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
    waits for its KV.

    The caller calls `begin` when it has done so for all that leave.
    """
    _plan(run, trajectory, source, target).vacates = True


def carry_prompt(run: Run, trajectory: Trajectory, source: EngineId, target: EngineId) -> None:
    """Move the KV of the open turn's prompt, which the source has computed, to the
    engine that has the turn. The caller calls `begin`.
    """
    _plan(run, trajectory, source, target).prompt = True


def _plan(run: Run, trajectory: Trajectory, source: EngineId, target: EngineId) -> Migration:
    """Plan a migration in place of the one that the trajectory has, if any."""
    migrations = run.state.migrations
    attempts.forget_migration(run, trajectory)
    number = trajectory.migration = migrations.next_number
    migrations.next_number += 1
    migrations.open[number] = Migration(
        number=number,
        trajectory_id=trajectory.id,
        attempt=trajectory.attempt,
        source=source,
        target=target,
    )
    return migrations.open[number]


def holds_turn(run: Run, trajectory: Trajectory) -> bool:
    """True if the turn that the trajectory now requests must wait for a transfer.

    A transfer that has not begun is dropped.
    """
    if trajectory.migration is None:
        return False
    migration = run.state.migrations.open[trajectory.migration]
    if migration.since is not None or migration.vacates:
        return True
    attempts.forget_migration(run, trajectory)
    return False


def complete(run: Run, event: MigrationDone) -> list[Trajectory]:
    """End a transfer that the world reports. Return the trajectories whose turns wait
    no longer.
    """
    m = run.state.migrations.open.get(event.number)
    if m is None or m.since is None:
        return []
    return _end(run, m, event.moved_tokens, event.error)


def give_up_late(run: Run) -> list[Trajectory]:
    """Give up transfers that have taken too long. Return the trajectories whose turns
    wait no longer.
    """
    released = []
    for m in list(run.state.migrations.open.values()):
        if m.since is not None and run.now - m.since > TRANSFER_S:
            released += _end(run, m, 0, f"no answer within {TRANSFER_S:g} s")
    return released


def _end(run: Run, m: Migration, moved_tokens: int, error: str) -> list[Trajectory]:
    """End a transfer, and begin those that waited for its engines."""
    return _settle(run, m, moved_tokens, error) + begin(run)


def _settle(run: Run, m: Migration, moved_tokens: int, error: str) -> list[Trajectory]:
    state, counted = run.state, run.state.counters.scheduling
    del state.migrations.open[m.number]
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
            state.migrations.token_s += (MEMORY if state.migrations.token_s else 1.0) * (
                token_s - state.migrations.token_s
            )
    released = []
    trajectory = attempts.find(run, m.trajectory_id, m.attempt)
    if trajectory is not None and trajectory.migration == m.number:
        trajectory.migration = None
        trajectory.assigned_engine = _engine_after(run, m, moved=not error)
        run.reindex(trajectory)
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
    if trajectory is None or trajectory.migration != m.number:
        return []
    trajectory.migration = None
    if error:
        run.state.counters.scheduling.split_failed += 1
        if m.since is not None:
            run.warn(
                m.target,
                f"KV of {m.trajectory_id} did not come from {m.source}: {error}",
                count="prompt_failed",
            )
    else:
        prompt = trajectory.open_turn.prompt
        assert prompt is not None, "its turn waits for the KV"
        lacked = moved_tokens - phases.cached_tokens(run, trajectory, run.state.engines[m.target])
        phases.learn_move(run, run.now - prompt.since, max(BLOCK_TOKENS, lacked))
    return [trajectory]


def _engine_after(run: Run, m: Migration, *, moved: bool) -> EngineId | None:
    """The engine that holds the KV; else the other end; else None (any engine).

    A trajectory moved to free its source never returns to it.
    """
    if m.vacates:
        return m.target if assignment.is_usable(run, m.target) else None
    ends = (m.target, m.source) if moved else (m.source, m.target)
    return next((end for end in ends if assignment.is_usable(run, end)), None)
