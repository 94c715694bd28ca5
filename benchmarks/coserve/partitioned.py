"""`rollweave engine --lend` with a fixed half of the memory for each of the two models,
which never changes hands: the baseline of ROSE's Table 2. As an engine's process, it is
that of the engine.
"""

import sys
from functools import partial

from rollweave.core.policy.kv_budget import KvBudget


class FixedHalf(KvBudget):
    """The budget of rollouts is a half from the first step on, and never cut."""

    @property
    def serving_most(self) -> int:
        return self.total - self.total // 2

    def begin_step(self, recent_use: int) -> int:
        self.budget = self.total // 2
        return self.budget

    def observe(self, serving: int) -> int:
        return self.budget

    def raise_to(self, recent_use: int) -> int:
        return self.budget

    def fits(self, *, serving: int, held: int, more: int) -> bool:
        return held + more <= self.budget


def main() -> None:
    """Be the command, or the engine's process that it starts."""
    if sys.argv[1] == "engine":
        from rollweave.cli import engine
        from rollweave.cli.main import app

        engine.MODULE = "benchmarks.coserve.partitioned"
        app()
        return
    from rollweave.engine.coserving import executor
    from rollweave.runtime.entrypoints.engine import main as serve

    executor.CoServing = partial(executor.CoServing, budget=FixedHalf)  # type: ignore[assignment,misc]
    serve()


if __name__ == "__main__":
    main()
