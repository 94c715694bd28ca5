"""The pools of task domains, as they are learned (RollArt §9; `pools/learning`)."""

from rollweave.core.mechanisms.pools import learning
from rollweave.core.mechanisms.pools.state import NAME, Pools
from rollweave.core.run import Mechanism, TrainerMove, TurnMove
from rollweave.core.state import Stage
from rollweave.schema.config.root import RunConfig


def used(config: RunConfig) -> bool:
    """True if task domains move to the pools that serve them best."""
    return config.rollout.affinity == "learned"


MECHANISM = Mechanism(
    name=NAME,
    used=used,
    state=Pools,
    follows={
        Stage.INIT: learning.give_pool,
        TurnMove.DONE: learning.turn_done,
        TrainerMove.TRAINED: learning.plan,
    },
    check=learning.check,
)
