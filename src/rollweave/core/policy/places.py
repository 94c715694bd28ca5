"""Decide how many attempts may enter the stages INIT, RUN and EVAL (ProRL §3.3.1).

Each stage has a pool of places. An attempt whose environment is ready waits for RUN
with its environment. INIT starts no more when twice as many environments as it has
places are starting or waiting: more of them would take memory and grow stale while RUN
is full, and with fewer INIT would stand still whenever RUN is full for a moment. So
there are never more environments than `Places.alive`.

Nothing that an attempt in RUN waits for needs another attempt to enter RUN, with one
exception: in mode decoupled, an engine loads the weights that attempts in RUN wait for
only after all that it has launched are over. There, `Places.alive` is the number of
places of RUN, so that every attempt that is launched has one.
"""

from typing import NamedTuple

from rollweave.schema.config.rollout import STARTED, Places

BACKLOG = 7
"""Number of rolled-out attempts for each place of RUN that may wait for EVAL before no
further attempt is started.
"""


class Taken(NamedTuple):
    """The number of attempts that hold a place of INIT, wait for RUN with a ready
    environment, hold a place of RUN, wait for EVAL, and hold a place of EVAL.
    """

    init: int
    ready: int
    run: int
    rolled_out: int
    eval: int

    @property
    def alive(self) -> int:
        """The number of environments."""
        return self.init + self.ready + self.run


def room_in_init(places: Places, taken: Taken) -> int:
    """Return how many attempts may enter INIT now."""
    if is_backlogged(places, taken):
        return 0
    started = STARTED * places.init - taken.init - taken.ready
    return max(0, min(places.init - taken.init, started, places.alive - taken.alive))


def room_in_run(places: Places, taken: Taken) -> int:
    """Return how many of the attempts that wait for RUN may enter it now."""
    return max(0, places.run - taken.run)


def room_in_eval(places: Places, taken: Taken) -> int:
    """Return how many of the attempts that wait for EVAL may enter it now."""
    return max(0, places.eval - taken.eval)


def is_backlogged(places: Places, taken: Taken) -> bool:
    """True if so many attempts wait for EVAL that no further attempt is started."""
    return taken.rolled_out - room_in_eval(places, taken) >= BACKLOG * places.run


def most_rolled_out(places: Places) -> int:
    """Return the maximum number of attempts that wait for EVAL: the last attempt starts
    when the queue is almost full, and then all that are under way are rolled out.
    """
    return BACKLOG * places.run + places.eval + places.alive
