"""The pools of task domains, as they are learned (RollArt §9; `pools/learning`)."""

from rollweave.core.mechanisms.pools import learning
from rollweave.core.mechanisms.pools.state import NAME, Pools
from rollweave.core.policy.scheduling import has_learned_pools
from rollweave.core.run import Mechanism, TrainerMove, TurnMove
from rollweave.core.state import Stage

MECHANISM = Mechanism(
    name=NAME,
    used=has_learned_pools,
    state=Pools,
    follows={
        Stage.INIT: learning.give_pool,
        TurnMove.DONE: learning.turn_done,
        TrainerMove.TRAINED: learning.plan,
    },
    check=learning.check,
)
