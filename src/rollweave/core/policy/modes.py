"""The modes, as presets of small policies: how far rollouts may run ahead of training
(docs/decisions/0008).

A mode answers four questions. How many steps may lie between the weights that started a
trajectory and the weights that train on it (`window`; None: any number)? When do
engines take newly published weights (`update`)? Is a trajectory that can no longer be
trained on aborted immediately, or only rejected when it is done (`aborts`)? May a
step's mini-batches train as they complete (`streamed`)? Everything else (what is
launched, what is certain to become too old, what a batch accepts) follows.

RollArt §6.2 updates engines when the next batch is ready, and trains on it meanwhile.
Staleness is strict here (docs/decisions/0002): with a window of 1, everything in flight
would become too old while new weights wait for the batch. Therefore `bounded` updates
engines immediately, or in the paper's order without `early_updates`.

Staleness is counted in steps, from the weights that served when the trajectory was
launched to the weights that the training step starts from: queueing, rollout, reward
and buffer time all count. No trained trajectory ever exceeds the bound.
"""

import enum
from collections.abc import Mapping

from rollweave.schema.base import Struct
from rollweave.schema.config.rollout import ModeName


def staleness(initiated: int, trained_at: int) -> int:
    """Return the number of steps between the two versions.

    After a trainer was restored to an earlier step, an engine may still have the larger
    version `initiated`, of discarded weights: its staleness is the absolute difference.
    """
    return abs(trained_at - initiated)


def origin(version: int, restored_to: int | None) -> int:
    """Return the version from which the staleness of what `version` sampled counts, if
    the trainer was restored to step `restored_to` since.

    The trainer's way from discarded weights leads back to that step first: weights that
    were n steps beyond it count as n steps before it. The new weights that will have
    their number are others.
    """
    return version if restored_to is None or version <= restored_to else 2 * restored_to - version


def parted(restores: Mapping[int, int], version: int, publication_id: int) -> int | None:
    """Return the earliest step to which the trainer was restored since weights of this
    version were published, if that step is earlier than the version: the weights are
    discarded, and count from there (`origin`). None if they are not discarded.

    `restores` has the step of each restoration, by the publication id of the first
    weights after it.
    """
    steps = (step for first_id, step in restores.items() if publication_id < first_id)
    return min((step for step in steps if step < version), default=None)


def acceptable(initiated: int, trained_at: int, window: int | None) -> bool:
    """True if a step that starts from version `trained_at` may use a trajectory
    launched under version `initiated`.
    """
    return window is None or staleness(initiated, trained_at) <= window


class Update(enum.Enum):
    """The moment at which engines take published weights.

    For the final evaluation, engines take them immediately in every mode.
    """

    # interrupts turns in flight (AReaL); also sync, where nothing is in flight
    AT_ONCE = "at_once"
    # when the next batch is complete: RollArt, and one-step, where nothing is in flight
    ROLLED_OUT = "rolled_out"
    # each engine by itself, when its batch is done: no trajectory meets two versions
    # (Laminar §3)
    INDEPENDENT = "independent"


class Mode(Struct, frozen=True, kw_only=True):
    window: int | None
    update: Update
    aborts: bool = True
    streamed: bool = False

    @property
    def independent_updates(self) -> bool:
        """True if each engine takes weights by itself, and a trajectory stays on
        engines that have the weights it started with.
        """
        return self.update is Update.INDEPENDENT


ALPHA = 1
"""Window of `partial` and `bounded`, in steps, unless `alpha` is given."""


def preset(name: ModeName, alpha: int | None = None, *, early_updates: bool = True) -> Mode:
    """Return the mode called `name`.

    `alpha` is the window, in steps, of `partial` (η), `bounded` (α) and `decoupled`,
    which has no window unless `alpha` is given. Without `early_updates`, engines of
    `bounded` wait for the next batch (RollArt §6.2, where a trajectory is `alpha` − 1
    versions behind the engines').
    """
    window = ALPHA if alpha is None else alpha
    match name:
        case ModeName.SYNC:
            return Mode(window=0, update=Update.AT_ONCE)
        case ModeName.ONE_STEP:
            return Mode(window=1, update=Update.ROLLED_OUT)
        case ModeName.STREAM:
            return Mode(window=1, update=Update.ROLLED_OUT, streamed=True)
        case ModeName.PARTIAL:
            return Mode(window=window, update=Update.AT_ONCE, aborts=False)
        case ModeName.BOUNDED:
            update = Update.AT_ONCE if early_updates else Update.ROLLED_OUT
            return Mode(window=window, update=update)
        case ModeName.DECOUPLED:
            return Mode(window=alpha, update=Update.INDEPENDENT, aborts=False)


def update_now(mode: Mode, *, batch_ready: bool, in_flight: int, too_old: bool) -> bool:
    """Return whether engines may take the newly published weights now. (Where engines
    update one by one, `mechanisms/versions/binding` decides.)

    `batch_ready`: the batch that these weights train on is complete, or taken.
    `in_flight` counts training groups that are not complete yet. `too_old`: no
    trajectory launched under the engines' version could still be trained on, so that
    the wait would never end.
    """
    if too_old:
        return True
    match mode.update:
        case Update.AT_ONCE:
            return True
        case Update.ROLLED_OUT:
            return batch_ready or in_flight == 0
        case Update.INDEPENDENT:
            return False
