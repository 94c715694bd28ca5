"""The borrower's model of a co-serving engine, and its measurement."""

import msgspec

from rollweave.core.policy.admission import Profile
from rollweave.engine.core import EngineCore
from rollweave.engine.coserving.memory import MappedPool, ModelMemory
from rollweave.engine.coserving.profiles import profile_steps
from rollweave.engine.thread import Mailbox


class Tenant:
    """The borrower's model: its engine, the commands for it, and its memory."""

    def __init__(self, core: EngineCore, mailbox: Mailbox, pool: MappedPool) -> None:
        self.core, self.mailbox, self.pool = core, mailbox, pool
        self.memory: ModelMemory | None = None
        self.error = ""

    def build(self) -> None:
        """Build the model, on any thread, and reply `Ready`. `error` says
        why that failed.
        """
        try:
            self.core.reply(msgspec.structs.replace(self.core.build(), lent=True))
            planner = self.core.planner
            self.memory = ModelMemory(self.pool, planner.ledger, planner)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def execute(self) -> bool:
        """Execute the commands for the model."""
        return self.mailbox.execute(self.core)


class Measuring:
    """The measurement of a borrower's model, step by step. `expected_s` are the seconds
    of its next step, which has waited since `since`.
    """

    def __init__(self, tenant: Tenant, *, started: float, now: float) -> None:
        self.tenant, self.started, self.since = tenant, started, now
        core, blocks = tenant.core, tenant.pool.group_blocks
        self._steps = profile_steps(core.runner, blocks=blocks, slots=core.spec.max_slots)
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
