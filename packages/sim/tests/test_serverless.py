"""Instances start on demand, are reused while they are kept, and stop."""

import pytest

from rollweave_sim.workers import COLD_S, KEEP_S, WARM_S, Dedicated, Serverless


def test_calls_are_cold_at_first_and_after_the_keep_time() -> None:
    platform = Serverless()
    assert platform.call(0.0, 10.0) == COLD_S + 10.0
    assert platform.call(1.0, 10.0) == COLD_S + 10.0  # the first instance is busy
    assert platform.call(20.0, 10.0) == WARM_S + 10.0
    last_s = 20.0 + WARM_S + 10.0 + KEEP_S + 1.0
    assert platform.call(last_s, 10.0) == COLD_S + 10.0
    assert (platform.cold, platform.warm) == (3, 1)


def test_time_alive_is_start_work_and_idle_time() -> None:
    platform = Serverless()
    platform.call(0.0, 10.0)
    assert platform.alive_s == pytest.approx(COLD_S + 10.0)
    assert platform.utilization() == pytest.approx(10.0 / (COLD_S + 10.0 + KEEP_S))
    platform.call(COLD_S + 10.0 + 5.0, 20.0)
    assert platform.alive_s == pytest.approx(COLD_S + 10.0 + 5.0 + WARM_S + 20.0)
    assert platform.utilization() == pytest.approx(30.0 / (COLD_S + WARM_S + 35.0 + KEEP_S))


def test_calls_wait_for_the_first_instance_that_is_free() -> None:
    assert (Dedicated(2).utilization(), Serverless().utilization()) == (0.0, 0.0)
    two = Dedicated(2)
    waits = [two.call(now, seconds) for now, seconds in ((1.0, 4.0), (2.0, 9.0), (3.0, 5.0))]
    assert (waits, two.utilization()) == ([4.0, 9.0, 7.0], 18.0 / (11.0 * 2))
