"""Engines beside a simulated run that lend themselves to it.

Every ten seconds they report themselves to the run, which may borrow them, and at once
when one of them must be given back.
"""

import abc
from collections.abc import Callable, Sequence

from rollweave.schema import events as e
from rollweave.schema.base import Struct
from rollweave.sim.clock import Clock
from rollweave.sim.engine import SimEngine
from rollweave.sim.lent import LentEngine

REPORT_S = 10.0
"""Seconds between two reports of the engines to the run."""


class Latencies(Struct, frozen=True, kw_only=True):
    """The latencies of users: seconds to the first token, and of each further one in
    the mean of a request, as the 50th, 95th and 99th percentiles.
    """

    requests: int
    ttft_s: tuple[float, float, float]
    tpot_s: tuple[float, float, float]
    late_first: float  # share of requests whose first token came too late
    late_tokens: float  # share whose further tokens came too slowly
    serving_share: float  # of the engines' time, in which they served
    lent_share: float  # of the engines' time, in which they computed rollouts
    returned: int  # turns of rollouts that were given back
    cuts: int  # of the memory of rollouts, because serving needed it
    stalls: int  # because rollouts had made no progress


class Lending(abc.ABC):
    """The engines `names`, which lend themselves to the run called `run`.

    `on_touched(name)` is called when something else than the run changes what a lent
    engine does, and `on_returned(name, turns)` when it gives turns back, with the
    tokens that each has sampled.
    """

    chunk_tokens: int | None = None
    """Maximum prompt tokens of a step of a lent engine; the run's own if None."""
    prefix_cache = True
    """True if lent engines may keep the KV of finished turns."""

    def __init__(
        self, names: Sequence[str], *, run: str, clock: Clock, post: Callable[[e.Event], None]
    ) -> None:
        self.names = tuple(names)
        self.recalled: set[str] = set()  # must be given back
        self.silent = False  # they report nothing
        self.on_touched: Callable[[str], None] = lambda name: None
        self.on_returned: Callable[[str, dict[str, int]], None] = lambda name, turns: None
        self._run, self._clock, self._post = run, clock, post

    def start(self) -> None:
        """Begin to serve, if there are users, and to report."""
        self.report()
        self._clock.after(REPORT_S, self._report_again)

    def _report_again(self) -> None:
        self.report()
        self._clock.after(REPORT_S, self._report_again)

    def report(self) -> None:
        """Report all engines to the run now."""
        lenders = tuple(self._lender(name) for name in self.names)
        if not self.silent:
            self._post(e.LendersReported(lenders=lenders))

    @abc.abstractmethod
    def _lender(self, name: str) -> e.Lender:
        """Return what an engine reports of itself."""

    @abc.abstractmethod
    def activate(self, name: str) -> float:
        """Return the seconds until an engine that the run has chosen is ready, without
        its weights.
        """

    @abc.abstractmethod
    def lend(self, name: str, engine: SimEngine) -> SimEngine | LentEngine | None:
        """Lend an engine that is ready to the run, as `engine`; None if it does not
        lend itself now.
        """

    @abc.abstractmethod
    def take_back(self, name: str) -> None:
        """End the lease of an engine, which may not have been ready."""

    def latencies(self) -> Latencies | None:
        """Return the latencies of all requests that have been served so far; None
        without users.
        """
        return None
