"""A simulated serving engine that lends its slack: what users and rollouts get."""

import hashlib
import random
import re

import pytest

from packages.sim.tests.simulated_lender import LIMITS, Rig, every_turn_ends, rollouts
from rollweave.core.policy.admission import STALL_S
from rollweave_sim.engine import Done
from rollweave_sim.kv import Request


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


@pytest.mark.parametrize("limits", [{}, {"tpot": False}, {"ttft": False}])
@pytest.mark.parametrize("seed", range(6))
def test_every_turn_is_answered_aborted_or_given_back(limits: dict[str, bool], seed: int) -> None:
    every_turn_ends(Rig(**limits), random.Random(seed))


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


@pytest.mark.parametrize(
    ("limits", "expected"),
    [({}, "878376d1"), ({"tpot": False}, "e0a962c0"), ({"ttft": False}, "d8cf6be8")],
)
def test_a_load_always_has_the_same_times(limits: dict[str, bool], expected: str) -> None:
    """If a change of them is meant, take the digest that the failure prints."""
    total, seen = hashlib.blake2b(digest_size=4), list[object]()
    for seed in range(6):
        every_turn_ends(rig := Rig(**limits), random.Random(seed))
        seen += [(one.key, one.at, one.cached_tokens, one.queue_s) for one in rig.done]
        seen += [*rig.first.values(), *rig.last.values(), *rig.returned.items(), rig.lender.cuts]
        seen += [rig.lender.serving_s, rig.lender.stalls, rig.lender.use(2e7) * 1e7]
    total.update(re.sub(r"(\.\d{5})\d+", r"\1", repr(seen)).encode())
    assert total.hexdigest() == expected
