"""A simulated serving engine that lends itself, driven from event to event."""

import random

from rollweave.core.policy.admission import Slo
from rollweave_sim.engine import Done, SimEngine
from rollweave_sim.kv import Request
from rollweave_sim.lender import PAGE_BYTES, Lender, Served
from rollweave_sim.lending import LentEngine
from rollweave_sim.noise import Noise
from rollweave_sim.traffic import Memory
from tests.support.simulation import Linear

COST = Linear(kv_tokens=4000)
LIMITS = Slo(ttft_s=0.25, tpot_s=0.08)
MEMORY = Memory(
    total=1000.0 * PAGE_BYTES,
    kv=1000.0 * PAGE_BYTES,
    serving_token=PAGE_BYTES,
    rollout_token=PAGE_BYTES,
)


class Rig:
    """A lender, driven from event to event, and what came out of it."""

    def __init__(
        self,
        kind: type[Lender] = Lender,
        *,
        lends: bool = True,
        noise: Noise | None = None,
        **limits: bool,
    ) -> None:
        self.lender = kind(
            "s0", phase="both", cost=COST, limits=LIMITS, memory=MEMORY, noise=noise, **limits
        )
        self.first: dict[Served, float] = {}
        self.last: dict[Served, float] = {}
        self.returned: dict[str, int] = {}
        self.done: list[Done] = []
        self.lender.on_first = self._first
        self.lender.on_last = self.last.__setitem__
        self.lender.on_returned = self.returned.update
        self.now = 0.0
        self._joins: list[tuple[float, Served]] = []
        self.engine = rollouts()
        self.lent = LentEngine(self.lender, self.engine, now=0.0) if lends else None
        if self.lent is not None:
            self.lent.load(0.0, 1)

    def _first(self, request: Served, at: float) -> None:
        self.first[request] = at
        if request.output_tokens > 1:
            self._joins.append((at, request))

    def until(self, now: float) -> None:
        while True:
            due = self.lender.next_at()
            if due is None or due > now:
                break
            assert due >= self.now - 1e-9, "time runs forward"
            self.now = max(self.now, due)
            self.done += self.lender.advance(self.now)
            for _, request in self._joins:
                self.lender.join(self.now, request)
            self._joins.clear()
            self.engine.check()
        self.now = now

    def user(self, now: float, prompt: int, output: int) -> Served:
        self.until(now)
        request = Served(arrived=now, prompt_tokens=prompt, output_tokens=output)
        self.lender.arrive(now, request)
        return request

    def rollout(self, now: float, key: str, context: int = 20, output: int = 10) -> bool:
        self.until(now)
        assert self.lent is not None
        return self.lent.add(now, Request(key=key, context_tokens=context, output_tokens=output))


def rollouts() -> SimEngine:
    return SimEngine(
        cost=COST, slots=4, chunk_tokens=16, block_tokens=4, prefix_cache=True, kv_tokens=800
    )


def every_turn_ends(rig: Rig, draw: random.Random) -> None:
    """Offer a random load of users and rollouts, and check that every turn is answered,
    aborted or given back.
    """
    now, live, refused = 0.0, set[str](), 0
    users = []
    for number in range(60):
        now += draw.expovariate(10.0)
        kind = draw.random()
        if kind < 0.4:
            users.append(rig.user(now, draw.randint(1, 120), draw.randint(1, 30)))
        elif kind < 0.8:
            if rig.rollout(now, f"t{number}", draw.randint(1, 200), draw.randint(1, 60)):
                live.add(f"t{number}")
            else:
                refused += 1
        elif kind < 0.9 and live:
            rig.until(now)
            key = draw.choice(sorted(live))
            assert rig.lent is not None
            if rig.lent.abort(now, key) is not None:
                live.discard(key)
        elif rig.lent is not None:
            rig.until(now)
            rig.lent.suspend(now)
            rig.until(now + 0.5)
            rig.lent.load(now + 0.5, number)
            rig.lent.resume(now + 0.5)
            now += 0.5
    rig.until(1e7)
    answered = {done.key for done in rig.done}
    assert answered | rig.returned.keys() == live
    assert not answered & rig.returned.keys()
    assert rig.lender.next_at() is None
    assert all(user in rig.first for user in users)
    assert rig.lender.serving_s + rig.engine.busy_s <= 1e7
