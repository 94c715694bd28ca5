"""The suite runs the same wherever it is started from: no test inherits an ignored or
blocked signal.
"""

from rollweave.io.inherited import reset_signals
from tests.support.properties import register_profiles

reset_signals()
register_profiles()
