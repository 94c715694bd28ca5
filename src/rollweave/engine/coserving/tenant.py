"""One of the two models of a co-serving engine, and its measurement."""

from rollweave.core.policy.admission import Profile
from rollweave.engine.coserving.memory import MappedPool, ModelMemory
from rollweave.engine.coserving.profiles import ProfileSteps, profile_steps
from rollweave.engine.loop import EngineLoop


class Tenant:
    """One of the models: its loop, its memory, and its profile."""

    def __init__(self, loop: EngineLoop, pool: MappedPool) -> None:
        self.loop, self.pool = loop, pool
        self.memory: ModelMemory | None = None
        self.profile: Profile | None = None
        self.error = ""

    def build(self) -> None:
        """Build the model, on any thread. `error` says why that failed."""
        try:
            self.loop.build()
            planner = self.loop.planner
            self.memory = ModelMemory(self.pool, planner.ledger, planner)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def profile_steps(self) -> ProfileSteps:
        """Measure the model step by step."""
        return profile_steps(
            self.loop.runner, blocks=self.pool.group_blocks, slots=self.loop.spec.max_slots
        )


class Measuring:
    """The measurement of a borrower's model, step by step. `expected_s` are the seconds
    of its next step, which has waited since `since`.
    """

    def __init__(self, tenant: Tenant, *, started: float, now: float) -> None:
        self.tenant, self.started, self.since = tenant, started, now
        self._steps = tenant.profile_steps()
        self.expected_s = next(self._steps)

    def step(self, *, fits: bool) -> Profile | None:
        """Compute the next step, or leave its size out if it does not fit. Return the
        profile at the end.
        """
        try:
            self.expected_s = self._steps.send(fits)
        except StopIteration as end:
            profile: Profile = end.value
            return profile
        return None

    def end(self) -> None:
        """Give the measurement up."""
        self._steps.close()
