"""Mode decoupled (Laminar §3, §4): trajectories are bound to the weights with which
they began, and engines update one by one.
"""

from rollweave.core.mechanisms.versions import binding, consolidation
from rollweave.core.mechanisms.versions.binding import Versions
from rollweave.core.mechanisms.versions.pacing import IndependentPacing
from rollweave.core.run import Mechanism, TrainerMove
from rollweave.core.state import Stage
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import KvReported, WorldLost


def used(config: RunConfig) -> bool:
    """True if engines update one by one."""
    return config.rollout.mode is ModeName.DECOUPLED


MECHANISM = Mechanism(
    name="versions",
    used=used,
    state=Versions,
    pacing=IndependentPacing(),
    handlers={WorldLost: binding.on_world_lost, KvReported: binding.on_kv_reported},
    steps={"moves of trajectories": consolidation.check_due},
    follows={Stage.QUEUED: binding.begin_attempt, TrainerMove.PUBLISHED: consolidation.run_now},
    check=binding.check,
)
