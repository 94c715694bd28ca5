"""The lengths of trajectories: estimates of them, and the ranks of turns that follow
from the estimates (Heddle §4).
"""

from rollweave.core.mechanisms.lengths import estimates, index
from rollweave.core.mechanisms.lengths.index import Lengths, reindex
from rollweave.core.policy.scheduling import scheduling
from rollweave.core.run import Mechanism, Run, TrainerMove, TurnMove
from rollweave.core.state import Stage
from rollweave.schema.commands import FitPredictor
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import PredictionReady


def used(config: RunConfig) -> bool:
    """True if turns are ranked or assigned by anything but the time of their launch."""
    chosen = scheduling(config.rollout, config.ablation)
    orders = chosen.priority != "fcfs" or chosen.assigns or chosen.predicts
    return orders or config.allocation is not None


def _fit(run: Run) -> None:
    if run.scheduling.predicts:
        run.emit(FitPredictor(step=run.state.trainer.step - 1))


MECHANISM = Mechanism(
    name="lengths",
    used=used,
    state=Lengths,
    handlers={PredictionReady: estimates.on_prediction},
    steps={"ranks of turns": estimates.check_ranks},
    follows={
        Stage.QUEUED: estimates.begin_attempt,
        Stage.INIT: reindex,
        Stage.RUN_QUEUED: estimates.learn_prompt,
        Stage.CLOSING: reindex,
        Stage.EVAL_QUEUED: estimates.finish_attempt,
        Stage.OVER: estimates.cut_attempt,
        TurnMove.REQUESTED: estimates.learn_request,
        TurnMove.RANKED: estimates.set_rank,
        TurnMove.DONE: estimates.learn_turn,
        TrainerMove.TRAINED: _fit,
    },
    check=index.check,
)
