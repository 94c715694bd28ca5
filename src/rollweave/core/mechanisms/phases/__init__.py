"""Engines that compute prompts for others (RollArt §6.3; `phases/prompts`)."""

from rollweave.core.mechanisms.phases import prompts
from rollweave.core.policy.scheduling import splits_turns
from rollweave.core.run import Mechanism, TurnMove
from rollweave.schema.events import PrefillDone, WorldLost

MECHANISM = Mechanism(
    name="phases",
    used=splits_turns,
    state=prompts.Phases,
    handlers={PrefillDone: prompts.on_prefilled, WorldLost: prompts.on_world_lost},
    follows={
        TurnMove.GIVEN: prompts.give,
        TurnMove.BEGUN: prompts.begin_sampling,
        TurnMove.REFUSED: prompts.give_up,
        TurnMove.LEFT: prompts.withdraw,
        TurnMove.CARRIED: prompts.carried,
    },
    check=prompts.check,
)
