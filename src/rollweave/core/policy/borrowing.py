"""Choose the serving engines to borrow: the engines with the lowest recent use of KV
memory, each lent to at most one run (ROSE §4, System Workflow). And decide how long an
engine that gave turns back gets no new turns.
"""

from collections.abc import Iterable

from rollweave.schema.events import Lender

LEASE_S = 30.0
"""Seconds after which an engine is given back if its lender no longer reports it as
lent to the run.
"""

FIRST_REST_S, MOST_REST_S = 2.0, 60.0
"""Seconds for which an engine that gave turns back gets no turns: after the first time
(as long as a stall, ROSE §4.1), and at most.
"""


def rest_s(times: int) -> float:
    """Return the seconds for which an engine gets no turns after it gave turns back
    `times` times since it last finished a turn: twice as long as after the time before.

    Serving that leaves rollouts no time, or no memory, will often do so again soon, and
    each turn that tries waits for a stall. Raises ValueError for less than one time.
    """
    if times < 1:
        raise ValueError(f"times must be at least 1, got {times}")
    return min(MOST_REST_S, FIRST_REST_S * 2.0 ** min(times - 1, 10))


def to_borrow(lenders: Iterable[Lender], *, held: Iterable[str], most: int) -> list[str]:
    """Return the lenders to borrow in addition to those in `held`, up to `most` in all,
    the least used first.
    """
    taken = set(held)
    free = [
        lender
        for lender in lenders
        if not (lender.lent_to or lender.recalled or lender.name in taken)
    ]
    free.sort(key=lambda lender: (lender.kv_use, lender.name))
    return [lender.name for lender in free[: max(0, most - len(taken))]]


def must_return(name: str, lenders: Iterable[Lender], *, run: str) -> str:
    """Return the reason why a borrowed engine must be given back immediately; "" if it
    may be kept. A lender that is not reported may be late: its lease decides.
    """
    for lender in lenders:
        if lender.name == name:
            if lender.recalled:
                return "its lender needs it"
            if lender.lent_to not in ("", run):
                return f"it is lent to {lender.lent_to}"
    return ""
