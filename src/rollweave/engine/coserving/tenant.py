"""One of the two models of a co-serving engine."""

import torch

from rollweave.core.policy.admission import Profile
from rollweave.engine.coserving.memory import MappedPool, ModelMemory
from rollweave.engine.coserving.profiles import measure_profile
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
            with torch.inference_mode():
                self.profile = measure_profile(
                    self.loop.runner,
                    blocks=self.pool.group_blocks,
                    slots=self.loop.spec.max_slots,
                )
            planner = self.loop.planner
            self.memory = ModelMemory(self.pool, planner.ledger, planner)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
