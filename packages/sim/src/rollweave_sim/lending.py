"""Engines beside a simulated run that lend themselves to it.

Every ten seconds they report themselves to the run, which may borrow them, and at once
when one of them must be given back.

"""

import abc
from collections.abc import Callable, Sequence

from rollweave.schema import events as e
from rollweave.schema.base import Struct
from rollweave_sim.clock import Clock
from rollweave_sim.cost import EngineCosts
from rollweave_sim.engine import Done, SimEngine
from rollweave_sim.kv import Request
from rollweave_sim.lender import Lender


class LentEngine:
    """The engine of a run on a lender, with the calls of `SimEngine` in the wall's
    time.
    """

    def __init__(self, lender: Lender, engine: SimEngine, *, now: float) -> None:
        self.lender, self._engine = lender, engine
        lender.lend(now, engine)

    @property
    def cost(self) -> EngineCosts:
        return self._engine.cost

    @property
    def publication_id(self) -> int:
        return self._engine.publication_id

    @property
    def busy_s(self) -> float:
        return self._engine.busy_s

    @property
    def kv_tokens(self) -> int:
        return self._engine.kv_tokens

    @property
    def kv_used(self) -> int:
        return self._engine.kv_used

    def add(self, now: float, request: Request) -> bool:
        """Queue a request. Returns False if its KV would not fit."""
        engine, tau = self.lender.call(now)
        fits = self.lender.holds_rollouts and engine.fits(request)
        if fits:
            engine.add(tau, request)
        self.lender.called(now)
        return fits

    def abort(self, now: float, key: str) -> int | None:
        engine, tau = self.lender.call(now)
        sampled = engine.abort(tau, key)
        self.lender.called(now)
        return sampled

    def rerank(self, now: float, key: str, rank: float) -> None:
        engine, tau = self.lender.call(now)
        engine.rerank(tau, key, rank)
        self.lender.called(now)

    def reported_tokens(self, now: float) -> dict[str, int]:
        engine, tau = self.lender.call(now)
        reported = engine.reported_tokens(tau)
        self.lender.called(now)
        return reported

    def export_kv(self, now: float, key: str, shared_key: str) -> int:
        engine, tau = self.lender.call(now)
        blocks = engine.export_kv(tau, key, shared_key)
        self.lender.called(now)
        return blocks

    def import_kv(
        self, now: float, key: str, shared_key: str, blocks: int, *, shared_tokens: int
    ) -> int:
        engine, tau = self.lender.call(now)
        kept = engine.import_kv(tau, key, shared_key, blocks, shared_tokens=shared_tokens)
        self.lender.called(now)
        return kept

    def reprice(self, now: float, cost: EngineCosts) -> None:
        engine, tau = self.lender.call(now)
        engine.reprice(tau, cost)
        self.lender.called(now)

    def suspend(self, now: float) -> float:
        engine, tau = self.lender.call(now)
        settled = self.lender.wall(engine.suspend(tau))
        self.lender.called(now)
        return max(now, settled)

    def load(self, now: float, publication_id: int) -> None:
        engine, tau = self.lender.call(now)
        engine.load(tau, publication_id)
        self.lender.begin_step(now)
        self.lender.called(now)

    def resume(self, now: float) -> None:
        engine, tau = self.lender.call(now)
        engine.resume(tau)
        self.lender.called(now)

    def next_at(self) -> float | None:
        return self.lender.next_at()

    def advance(self, now: float) -> list[Done]:
        return self.lender.advance(now)

    def check(self) -> None:
        self._engine.check()


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
