"""The pacing of mode decoupled: each engine updates by itself, and trajectories are
bound to the weights with which they began. Groups for which the experience buffer has
no place are evicted (Laminar §3.1, §6).
"""

from collections.abc import Iterator, Sequence

from rollweave.core import weights
from rollweave.core.mechanisms import buffer
from rollweave.core.mechanisms.lengths.index import work_of
from rollweave.core.mechanisms.versions import binding
from rollweave.core.mechanisms.versions.binding import weights_of
from rollweave.core.mechanisms.versions.consolidation import CONSOLIDATION_S
from rollweave.core.policy.experience import evict
from rollweave.core.policy.redundancy import pool_room
from rollweave.core.run import Pacing, Run
from rollweave.core.state import Engine, GroupStatus, Trajectory
from rollweave.schema.base import EngineId, GroupId
from rollweave.schema.work import Purpose


class IndependentPacing(Pacing):
    """Each engine loads other weights when what it has launched is over."""

    interchangeable = False
    loads_checkpoints = True
    evaluates_on_one_engine = True
    check_s = CONSOLIDATION_S

    def admits(self, run: Run) -> bool:
        return True

    def room(self, run: Run) -> int:
        """Return as many groups as fill the free capacity of engines and buffer, or of
        engines alone where they run on as in Laminar.
        """
        state, rollout = run.state, run.config.rollout
        size = min(run.group_sizes.values())
        drawing = sum(
            state.groups[group_id].status is GroupStatus.DRAWING
            for group_id in state.drawing.active
        )
        return pool_room(
            free_capacity=binding.free_capacity(run),
            waiting=len(state.pools.queued) + drawing * size,
            running=len(state.pools.init) + len(state.pools.run),
            group_size=size,
            active=len(state.drawing.active),
            buffered=len(state.buffer),
            buffer_capacity=(
                None
                if "buffer_places" in run.config.ablation.without
                else binding.buffer_capacity(run)
            ),
            next_version=run.next_version(),
            groups_per_step=rollout.groups_per_step,
            last_step=run.config.run.steps,
        )

    def launch(self, run: Run, trajectory: Trajectory, purpose: Purpose) -> tuple[int, int] | None:
        sibling = None
        if purpose is Purpose.TRAIN and "mixed_groups" in run.config.ablation.without:
            sibling = binding.launched_sibling(run, trajectory)
            if sibling is not None and binding.launch_beside(run, trajectory, sibling):
                return sibling.initiated, weights_of(run, sibling)
        engine = binding.engine_for(run, purpose)
        if engine is None:
            return None
        if sibling is not None:
            run.warn(
                "rollout",
                f"group {trajectory.group_id} begins under several versions: the weights of "
                f"version {sibling.initiated} can no longer be loaded",
                count="mixed_group",
            )
        binding.launch_on(run, trajectory, engine)
        return engine.version, engine.publication_id

    def takes_episodes(self, run: Run) -> bool:
        return binding.engine_for(run, Purpose.EVAL) is not None

    def assign(self, run: Run, trajectory: Trajectory, avoid: Sequence[EngineId]) -> bool:
        assigned = work_of(run, trajectory).assigned_engine
        if assigned is not None and assigned not in avoid:
            engine = run.state.engines.get(assigned)
            if engine is not None and binding.serves_version_of(run, engine, trajectory):
                return True
        binding.assign(run, trajectory, avoid)
        return True

    def unassign_engine(self, run: Run, engine: Engine) -> None:
        binding.unassign_engine(run, engine)

    def may_drain(self, run: Run, engine: Engine) -> bool:
        return not binding.is_bound(run, engine)

    def wanted_weights(self, run: Run, engine: Engine) -> int | None:
        wanted = binding.wanted_weights(run, engine)
        return weights.newest(run, engine) if wanted is None else wanted

    def updates(self, run: Run) -> Iterator[tuple[Engine, int | None]]:
        """Yield each engine whose trajectories are over, with the weights that it is to
        load.
        """
        if run.state.publication.retained or run.state.publication.checkpointed:
            binding.abandon_if_lost(run)
            yield from binding.updates(run)

    def holds_back(self, run: Run, publication_id: int | None) -> bool:
        return False

    def can_still_evaluate(self, run: Run, publication_id: int) -> bool:
        return weights.is_obtainable(run, publication_id)

    def awaited_weights(self, run: Run) -> int | None:
        return binding.awaited_weights(run)

    def bound_weights(self, run: Run) -> set[int]:
        state = run.state
        bound = {
            weights_of(run, state.trajectories[member])
            for member in (*state.pools.init, *state.pools.run)
        }
        if state.evaluations.current is not None:
            bound.add(state.evaluations.current.publication_id)
        return bound

    def needed_checkpoints(self, run: Run) -> set[int]:
        return binding.needed_checkpoints(run)

    def begin_load(self, run: Run, engine: Engine) -> None:
        binding.begin_load(run, engine)

    def reassign(self, run: Run) -> list[Trajectory]:
        return binding.reassign(run)

    def choose_batch(self, run: Run, wanted: int) -> list[GroupId]:
        return buffer.choose(run, wanted)

    def unmeasured(self, run: Run, wanted: int) -> list[GroupId]:
        return buffer.unmeasured(run, wanted)

    def surplus(self, run: Run) -> list[GroupId]:
        """The buffered groups beyond the limit of the buffer, which have no place."""
        if not run.state.buffer:
            return []
        most = binding.buffer_limit(run)
        if len(run.state.buffer) <= most:
            return []
        return evict(buffer.views(run), version=run.next_version(), max_groups=most)
