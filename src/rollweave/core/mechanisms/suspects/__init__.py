"""Turns that end their engines: those of an engine that was lost run once more, each
alone on an engine, so that it is known which one is to blame (`suspects/policy`).
"""

from rollweave.core.mechanisms.suspects.check import check
from rollweave.core.mechanisms.suspects.isolation import start_suspects
from rollweave.core.mechanisms.suspects.losses import acquit, on_failed
from rollweave.core.run import EngineMove, Mechanism, TurnMove
from rollweave.schema.config.root import RunConfig


def used(_config: RunConfig) -> bool:
    """True: every run has engines that may be lost."""
    return True


MECHANISM = Mechanism(
    name="suspects",
    used=used,
    follows={
        EngineMove.FAILED: on_failed,
        EngineMove.SOUGHT: start_suspects,
        TurnMove.ACQUITTED: acquit,
    },
    check=check,
)
