"""The engines of a run, which may join and leave, and the places of engines and of the
trainer's ranks on hosts and their devices.
"""

from rollweave.core.mechanisms.membership import joining
from rollweave.core.run import EngineMove, Mechanism, TrainerMove
from rollweave.schema.events import EngineRegistered, EngineWithdrawn

MECHANISM = Mechanism(
    name="membership",
    used=lambda _: True,  # engines may join every run
    handlers={EngineRegistered: joining.on_registered, EngineWithdrawn: joining.on_withdrawn},
    steps={"end": joining.remove_drained},
    follows={
        EngineMove.REPLACED: joining.replaced,
        EngineMove.REMOVED: joining.removed,
        EngineMove.GIVEN_UP: joining.given_up,
        EngineMove.LOST: joining.end_if_last,
        TrainerMove.STARTING: joining.place_trainer,
    },
    check=joining.check,
)
