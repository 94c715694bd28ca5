"""The engine of a run on a simulated serving engine that lends its slack."""

from rollweave.sim.cost import EngineCosts
from rollweave.sim.engine import Done, SimEngine
from rollweave.sim.kv import Request
from rollweave.sim.lender import Lender


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
