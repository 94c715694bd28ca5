"""The engines that there are, and where: those that join and leave, and the places of
engines and of the trainer's ranks on hosts and their devices.
"""

from rollweave.core.mechanisms.membership import joining, losing
from rollweave.core.mechanisms.membership.check import check
from rollweave.core.run import EngineMove, Mechanism, TrainerMove
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import EngineRegistered, EngineWithdrawn


def used(_config: RunConfig) -> bool:
    """True: engines may join every run."""
    return True


MECHANISM = Mechanism(
    name="membership",
    used=used,
    handlers={
        EngineRegistered: joining.on_registered,
        EngineWithdrawn: joining.on_withdrawn,
    },
    steps={"end": joining.remove_drained},
    follows={
        EngineMove.REPLACED: joining.replaced,
        EngineMove.REMOVED: joining.removed,
        EngineMove.GIVEN_UP: losing.given_up,
        EngineMove.LOST: losing.end_if_last,
        TrainerMove.STARTING: losing.place_trainer,
    },
    check=check,
)
