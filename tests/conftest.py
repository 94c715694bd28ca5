"""The suite runs the same wherever it is started from: no test inherits an ignored or
blocked signal. A run that fails names the seed that repeats its order.
"""

import pytest

from rollweave.io.process_setup import reset_signals
from tests.support.properties import register_profiles

reset_signals()
register_profiles()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    seed = config.getoption("randomly_seed", None)
    if exitstatus and seed is not None:
        terminalreporter.line(f"repeat this order with --randomly-seed {seed}")
