"""Decide what follows for the turns of an engine that was lost: one of them may be the
reason, and would end the next engine, too.

After the first loss a turn is a suspect. A suspect runs once more, alone on an engine
that has finished its other turns. So if that engine is lost as well, it is known which
turn is to blame, and a turn that was near it by chance is cleared by its answer. Only
few engines run suspects at a time, and the others take turns as usual.
"""

from collections.abc import Container, Iterable

from rollweave.core.policy.routing import EngineLoad
from rollweave.schema.base import EngineId

MOST_SUSPECTS = 16
"""Maximum number of suspects of one loss, the newest of its turns: one that ends an
engine has rarely been there for long.
"""

SHARE = 4
"""One in so many engines may run a suspect at a time; one engine always may."""

MOST_EXCUSED = 8
"""Maximum number of losses of an engine in a row, without a finished turn in between,
that count as a turn's fault although no other engine was lost with the turn. Further
losses are the engine's own failures.
"""


def may_isolate(*, isolating: int, engines: int) -> bool:
    """True if one more of so many engines may run a suspect."""
    return isolating < max(1, engines // SHARE)


def engine_for_suspect(
    engines: Iterable[EngineLoad], *, avoid: Container[EngineId], isolating: Container[EngineId]
) -> EngineId | None:
    """Return the engine for a suspect, which begins once that engine is empty; None to
    keep it waiting for one.

    The engines `avoid` were lost with it: they are a last resort, since the loss of
    another engine is better evidence. Engines that also serve users are a last resort,
    too. Among the others, the engine with the fewest turns is empty first.
    """
    known = list(engines)
    dedicated = [engine for engine in known if not engine.borrowed] or known
    wanted = [engine for engine in dedicated if engine.id not in avoid] or dedicated
    free = [engine for engine in wanted if engine.id not in isolating]
    return min(free, key=lambda engine: (engine.active, engine.tokens)).id if free else None


def excuses(*, elsewhere: bool, excused: int) -> bool:
    """True if the loss of an engine, for which a turn is to blame, is not a failure of
    the engine. With `elsewhere`, another engine was lost with this turn before.
    `excused` counts the losses for which turns were blamed since the engine last
    finished a turn.
    """
    return elsewhere or excused < MOST_EXCUSED
