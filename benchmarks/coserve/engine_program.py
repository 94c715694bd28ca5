"""`rollweave engine --lend` as the bench starts it: with pages in proportion to its
models and, as the baseline of ROSE's Table 2, with a fixed half of the memory for each
of the two models, which never changes hands. Started as the child process of an engine,
it runs the engine.
"""

import os
import sys
from functools import partial

from rollweave.core.policy.kv_budget import KvBudget

PAGE_BYTES = 128 << 10
"""Size of a page. In one layer it has the KV of 128 tokens of the bench's serving
model, as a page of 2 MiB has of a model with 16 KiB per token and layer.
"""

PARTITIONED = "ROLLWEAVE_BENCH_PARTITIONED"
"""Environment variable with 1 in an engine of fixed halves."""


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

        engine.MODULE = "benchmarks.coserve.engine_program"
        engine.LendSpec = partial(engine.LendSpec, page_bytes=PAGE_BYTES)  # type: ignore[assignment,attr-defined]
        app()
        return
    from rollweave.engine.coserving import executor
    from rollweave.runtime.entrypoints.engine import main as serve

    if os.environ.get(PARTITIONED) == "1":
        executor.CoServing = partial(executor.CoServing, budget=FixedHalf)  # type: ignore[assignment,misc]
    serve()


if __name__ == "__main__":
    main()
