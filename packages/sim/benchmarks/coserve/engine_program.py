"""`rollweave engine --lend` as the bench starts it: with pages in proportion to its
models. Started as the child process of an engine, it runs the engine.
"""

import sys
from functools import partial

PAGE_BYTES = 128 << 10
"""Size of a page. In one layer it has the KV of 128 tokens of the bench's serving
model, as a page of 2 MiB has of a model with 16 KiB per token and layer.
"""


def main() -> None:
    """Be the command, or the engine's process that it starts."""
    if sys.argv[1] == "engine":
        from rollweave.cli import engine
        from rollweave.cli.main import app

        engine.MODULE = "packages.sim.benchmarks.coserve.engine_program"
        engine.LendSpec = partial(engine.LendSpec, page_bytes=PAGE_BYTES)  # type: ignore[assignment,attr-defined]
        app()
        return
    from rollweave.runtime.entrypoints.engine import main as serve

    serve()


if __name__ == "__main__":
    main()
