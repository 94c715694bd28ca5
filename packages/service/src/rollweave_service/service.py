"""A rollout service, from start to shutdown: joins its rollouts, its engines and its
world.
"""

from collections.abc import Callable

from rollweave.envs.tasks import TaskSource
from rollweave.record.store import TrajectoryStore
from rollweave.schema.commands import Deliver, Warn
from rollweave.schema.config.root import RunConfig
from rollweave_service.base import WorldPort
from rollweave_service.engines import EngineRegistry, EngineTokens
from rollweave_service.jobs import JobStore
from rollweave_service.messages import Health
from rollweave_service.rollouts import RolloutManager


class Service:
    """The object that the APIs of a service call: `rollouts`, `engines`, and its own
    status.

    The world must be attached to `world` before any request, and before it runs: a
    recovered world first delivers again the results that were never acknowledged. After
    the world has ended, `rollouts.end` wakes all that wait for results.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        jobs: JobStore,
        tokens: EngineTokens,
        source: TaskSource,
        store: TrajectoryStore,
    ) -> None:
        self.world, self._jobs = WorldPort(), jobs
        self.engines = EngineRegistry(self.world, jobs=jobs, tokens=tokens, warn=self.warned)
        self.rollouts = RolloutManager(
            config,
            self.world,
            jobs=jobs,
            source=source,
            store=store,
            waits_for=self.engines.waits_for,
        )
        self.on_warning: Callable[[Warn], None] = lambda _: None

    def restore(self) -> None:
        """Submit again the rollouts, and register again the engines, that the core does
        not know. Call once the world runs.
        """
        for job_id, reason in self._jobs.delete_unreadable():
            self.warned(
                Warn(
                    component=f"rollout {job_id}",
                    message=f"abandoned, because its request cannot be read: {reason}",
                )
            )
        self.engines.restore()
        self.rollouts.restore()

    # Called by the world.

    def delivered(self, command: Deliver) -> None:
        """Store and acknowledge a result."""
        self.rollouts.record(command)

    def warned(self, command: Warn) -> None:
        """Note a warning about an engine, and pass it on."""
        self.engines.note_warning(command)
        self.on_warning(command)

    # Status.

    def health(self) -> Health:
        """Return whether rollouts can begin, and the counts of what there is."""
        state = self.world.state
        return Health(
            status="closing"
            if self.world.closed
            else "ok"
            if self.engines.serving()
            else "no engine",
            reason=self.engines.waits_for(),
            queued=len(state.pools.queued),
            init=len(state.pools.init),
            run_queued=len(state.pools.run_queued),
            run=len(state.pools.run),
            eval_queued=len(state.pools.eval_queued),
            eval=len(state.pools.eval),
            closing=len(state.pools.closing),
            engines=len(self.engines.serving()),
            turns_waiting=len(state.turns.queue) + len(state.turns.suspects),
            turns_running=sum(len(engine.active) for engine in state.engines.values()),
            submitted=state.counters.submitted,
            output_tokens=state.counters.output_tokens,
        )
