"""The permission to run the user's code in this process: modules that a configuration
names, interpreters, and options of servers that may name files of code.

An agent whose operator has not allowed it (`rollweave host --user-code`) withdraws the
permission from its processes. A controller cannot give it to them.
"""

import os

VARIABLE = "ROLLWEAVE_USER_CODE"
"""Environment variable of an agent's processes."""

REFUSED = "no"

RULE = "must be built in on a host whose agent runs without --user-code"


def is_allowed() -> bool:
    """Return whether this process may run the user's code."""
    return os.environ.get(VARIABLE) != REFUSED
