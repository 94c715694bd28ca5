"""Decide whether an attempt that was lost with its worker or its controller may be
continued.

Its environment is gone and starts again; only the sampled tokens may be kept (Laminar
§3.2, §3.3 keep them when an engine is lost). The staleness of a continued attempt is
counted from its first launch, so a continuation is nothing but a long pause.
"""

from rollweave.core.policy.modes import Mode
from rollweave.core.policy.staleness import acceptable
from rollweave.schema.work import Purpose


def surviving_version(checkpoint: int | None, *, warms_up: bool) -> int:
    """Return the newest version that a restored trainer has or had; -1 if no version is
    certain. Later versions belong to a lost lineage: their numbers will mean other
    weights. Without a checkpoint the trainer begins again, with the same weights unless
    it warms up.
    """
    if checkpoint is not None:
        return checkpoint
    return -1 if warms_up else 0


def may_continue(
    initiated: int, *, launch: int, next_version: int, mode: Mode, purpose: Purpose
) -> bool:
    """True if an attempt that began under version `initiated` may continue under
    `launch`, in time for a step that starts from `next_version`.

    An episode of an evaluation has one version, and so has a trajectory of mode
    decoupled. In mode sync the window has the same effect: an attempt continues only if
    no step was lost or trained since it began. A service bounds no staleness: it
    returns the version of each token.
    """
    if purpose is Purpose.SERVE:
        return True
    if purpose is Purpose.EVAL:
        return initiated == launch
    if mode.independent_updates and initiated != launch:
        return False
    return initiated <= launch and acceptable(initiated, next_version, mode.window)
