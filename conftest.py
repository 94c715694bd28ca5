"""The suite runs the same wherever it is started from: no test inherits an ignored or
blocked signal. A run that fails names the seed that repeats its order.

The imports make a million objects that persist. No garbage collection traverses them,
neither while they are made, a quarter of the collection's time, nor in a test.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollweave.io.boot import reset_signals
from tests.support.forking import Forked, server
from tests.support.properties import register_profiles

STARTING_PROCESSES = {
    "benchmarks",
    "cli",
    "envs",
    "papers",
    "ray",
    "runtime",
    "sandbox",
    "servers",
    "service",
    "sim",
}
"""The folders of `tests` and `packages` whose tests start processes or whole runs, and
take longest.
"""

gc.disable()
reset_signals()
register_profiles()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long tests: if one of them came last, one core would stand
    idle. Mark all but the first variant of a test with the mark `variants`.
    """
    here, first = Path(__file__).parent, set[str]()
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        name = item.nodeid.split("[")[0]
        if item.get_closest_marker("variants") and name in first:
            item.add_marker("extended")
        first.add(name)
    items.sort(key=lambda item: item.path.relative_to(here).parts[1] not in STARTING_PROCESSES)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def forked_children() -> Iterator[None]:
    """Fork the engines, trainers, relays and predictors that a test starts in its own
    process, from a server that is there before a test counts processes and files.
    """
    server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollweave.io.child.Popen", Forked)
        yield


@pytest.fixture(autouse=True, scope="session")
def bfloat16_is_computed() -> Iterator[None]:
    """Compute bfloat16 in the tests' own processes on every CPU, so that their results
    do not depend on it. Tests of what happens without its instructions say so.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollweave.io.machine.has_bfloat16", lambda: True)
        yield


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    seed = config.getoption("randomly_seed", None)
    if exitstatus and seed is not None:
        terminalreporter.line(f"repeat this order with --randomly-seed {seed}")
