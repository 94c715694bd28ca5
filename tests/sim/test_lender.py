"""A simulated serving engine that lends its slack: what users and rollouts get."""

import random

import pytest

from rollweave.core.policy.admission import STALL_S, Slo
from rollweave.sim.coserving import SHARING, Memory
from rollweave.sim.engine import Done, SimEngine
from rollweave.sim.kv import Request
from rollweave.sim.lender import KEPT_S, PAGE_BYTES, RELOAD_S, Lender, Served
from rollweave.sim.lent import LentEngine
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

    def __init__(self, sharing: str = "cooperative", *, lends: bool = True) -> None:
        self.lender = Lender(
            "s0",
            phase="both",
            cost=COST,
            limits=LIMITS,
            memory=MEMORY,
            sharing=SHARING[sharing],
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


def test_without_users_rollouts_run_as_on_an_engine_of_the_run() -> None:
    rig, alone = Rig(), rollouts()
    expected: list[Done] = []
    for number in range(6):
        request = Request(key=f"t{number}", context_tokens=30 + number, output_tokens=9)
        rig.until(0.3 * number)
        assert rig.lent is not None
        rig.lent.add(0.3 * number, request)
        expected += alone.advance(0.3 * number)
        alone.add(0.3 * number, request)
    rig.until(1e6)
    while (due := alone.next_at()) is not None:
        expected += alone.advance(due)
    assert [(one.key, one.at) for one in rig.done] == [
        (one.key, pytest.approx(one.at)) for one in expected
    ]


def test_lending_costs_nothing_while_no_rollouts_come() -> None:
    seen = []
    for lends in (False, True):
        rig = Rig(lends=lends)
        users = [rig.user(2.0 * number, 40 + number, 20) for number in range(5)]
        rig.until(1e6)
        seen.append([at for user in users for at in (rig.first[user], rig.last[user])])
    assert seen[0] == pytest.approx(seen[1])


@pytest.mark.parametrize("seed", range(8))
def test_both_limits_hold_beside_rollouts_that_use_the_rest(seed: int) -> None:
    """As long as they hold for users alone."""
    draw = random.Random(seed)
    rig, alone = Rig(), Rig(lends=False)
    for number in range(12):
        rig.rollout(0.0, f"t{number}", output=150)
    now, users = 0.0, []
    for _ in range(10):
        now += draw.uniform(0.1, 0.8)
        prompt, output = draw.randint(5, 30), draw.randint(1, 20)
        users.append((rig.user(now, prompt, output), alone.user(now, prompt, output)))
    rig.until(1e6)
    alone.until(1e6)
    for user, quiet in users:
        assert alone.first[quiet] - quiet.arrived <= LIMITS.ttft_s
        assert rig.first[user] - user.arrived <= LIMITS.ttft_s + 1e-9
        if user.output_tokens > 1:
            pace = (rig.last[user] - rig.first[user]) / (user.output_tokens - 1)
            assert pace <= LIMITS.tpot_s + 1e-9
    assert len(rig.done) + len(rig.returned) == 12


@pytest.mark.parametrize("sharing", sorted(SHARING))
@pytest.mark.parametrize("seed", range(6))
def test_every_turn_is_answered_aborted_or_given_back(sharing: str, seed: int) -> None:
    draw = random.Random(f"{sharing}/{seed}")
    rig, now, live, refused = Rig(sharing), 0.0, set[str](), 0
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


def test_a_burst_takes_memory_of_rollouts_until_the_next_step() -> None:
    rig = Rig()
    for number in range(4):
        assert rig.rollout(0.0, f"t{number}", context=150, output=300)
    rig.until(1.0)
    before = rig.engine.kv_tokens
    for number in range(4):
        rig.user(1.0 + number / 100, 130, 40)
    rig.until(3.0)
    assert before // rig.engine.kv_tokens in (2, 4)
    assert rig.returned, "turns that no longer fit are given back"
    assert rig.lent is not None
    rig.until(1e6)
    rig.lent.load(1e6, 2)  # what serving used since the last step counts
    rig.lent.load(1e6, 3)
    assert rig.engine.kv_tokens == pytest.approx(before, rel=0.2), "as serving has ended"


def test_rollouts_without_progress_are_given_back() -> None:
    rig = Rig()
    users = [rig.user(0.0, 400, 2) for _ in range(60)]
    rig.rollout(0.0, "t0")
    rig.until(STALL_S + 0.5)
    assert rig.returned == {"t0": 0}
    rig.until(1e6)
    assert all(user in rig.first for user in users)


def test_kv_of_finished_turns_is_kept_for_the_lease_alone() -> None:
    rig = Rig()
    assert rig.lent is not None
    rig.rollout(0.0, "t0", context=40)
    rig.until(200.0)
    kept = rig.lent.export_kv(200.0, "t0", "")
    rig.rollout(300.0, "t1", context=8, output=200)
    rig.until(1000.0)
    assert kept > 0
    assert rig.lent.export_kv(1000.0, "t0", "") == 0


def test_an_engine_that_holds_one_model_at_a_time_loads_the_other() -> None:
    """Rollouts come once users were away for long enough, and go when they return."""
    rig = Rig("autoscaling")
    first = rig.user(0.0, 40, 10)
    rig.until(1.0)
    assert not rig.rollout(1.0, "t0"), "it holds the serving model"
    served_at = rig.last[first]
    rig.until(served_at + KEPT_S + RELOAD_S - 0.1)
    assert not rig.lender.takes
    rig.until(served_at + KEPT_S + RELOAD_S + 0.1)
    assert rig.lender.takes
    assert rig.rollout(100.0, "t1", output=700)
    second = rig.user(101.0, 40, 10)
    rig.until(101.5)
    assert not rig.lender.takes
    rig.until(1000.0)
    assert rig.returned.keys() == {"t1"}
    assert rig.returned["t1"] > 0
    assert RELOAD_S <= rig.first[second] - 101.0 <= RELOAD_S + 5.0
    assert rig.lender.takes, "users are away again"


def test_an_engine_that_is_woken_serves_again() -> None:
    rig = Rig("autoscaling")
    rig.until(KEPT_S + RELOAD_S)
    assert rig.lender.holds_rollouts
    rig.lender.wake(rig.now)
    rig.until(rig.now + RELOAD_S)
    assert rig.lender.holds_serving
    user = rig.user(rig.now, 40, 1)
    rig.until(rig.now + 10.0)
    assert rig.first[user] - user.arrived < 5.0
