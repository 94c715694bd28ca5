"""Health checks of servers, the servers that each rollout server uses, and gaps."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.health import (
    DOWN_AFTER,
    UP_AFTER,
    Host,
    Hysteresis,
    max_gap,
    spread,
    wide_gaps,
)


@pytest.mark.parametrize(
    ("gap", "is_wide"), [(0.0, False), (1e-3, False), (2e-3, True), (math.nan, True)]
)
def test_a_gap_is_wide_beyond_rounding(gap: float, is_wide: bool) -> None:
    values = {"logprob_gap/e0": gap, "logprob_gap/e1": 0.0, "logprob_gap_mean": 5.0, "loss": 9.0}
    assert list(wide_gaps(values, max_gap("float32"))) == (["e0"] if is_wide else [])


def test_the_least_precise_format_counts() -> None:
    assert max_gap("float32", "bfloat16") == max_gap("bfloat16") > max_gap("float32")


@given(st.lists(st.booleans(), max_size=60))
def test_health_changes_only_after_checks_in_a_row(checks: list[bool]) -> None:
    health = Hysteresis()
    for at, good in enumerate(checks):
        before = health.healthy
        needed = UP_AFTER if good else DOWN_AFTER
        run = checks[max(0, at + 1 - needed) : at + 1]
        agreed = len(run) == needed and all(check is good for check in run)
        assert health.observe(good) is (good if agreed else before)


HOSTS = st.sampled_from(["h1", "h2", "h3", "h4"])


def hosts(prefix: str) -> st.SearchStrategy[list[Host]]:
    places = st.lists(HOSTS, max_size=8)
    return places.map(
        lambda names: [Host(server=f"{prefix}{at}", host=host) for at, host in enumerate(names)]
    )


@given(hosts("llm"), hosts("rollout"))
def test_servers_are_distributed_near_first_and_to_every_client(
    llms: Sequence[Host], rollouts: Sequence[Host]
) -> None:
    uses = spread(llms, rollouts)
    assert list(uses) == [rollout.server for rollout in rollouts]
    if not llms or not rollouts:
        assert all(not used for used in uses.values())
        return
    where = {rollout.server: rollout.host for rollout in rollouts}
    inhabited = set(where.values())
    users = {
        llm.server: [name for name, used in uses.items() if llm.server in used] for llm in llms
    }
    assert all(users.values()), "every LLM server is used"
    assert all(uses.values()), "no rollout server is idle"
    for llm in llms:
        if llm.host in inhabited:
            assert any(where[name] == llm.host for name in users[llm.server]), "near first"
    for host in inhabited:
        near = [
            sum(llm.host == host for llm in llms if llm.server in uses[name])
            for name in uses
            if where[name] == host
        ]
        own = [llm for llm in llms if llm.host == host]
        if len(own) >= len(near):
            assert max(near) - min(near) <= 1, "those of one host share evenly"
    shared = [len(names) for names in users.values()]
    assert max(shared) - min(shared) <= 1, "all are shared alike"
    exclusive = sum(len(used) == 1 for used in uses.values())
    assert sum(shared) - len(llms) <= exclusive, (
        "only a client without a server of its own borrows, and borrows one"
    )


def test_the_rest_is_dealt_round_robin() -> None:
    llms = [Host(server=f"far{number}", host="elsewhere") for number in range(4)] + [
        Host(server="near", host="h1")
    ]
    rollouts = [
        Host(server="r1", host="h1"),
        Host(server="r2", host="h2"),
        Host(server="r3", host="h3"),
    ]
    expected = {"r1": ("near", "far2"), "r2": ("far0", "far3"), "r3": ("far1",)}
    assert spread(llms, rollouts) == expected
    assert spread(llms[4:], rollouts) == {"r1": ("near",), "r2": ("near",), "r3": ("near",)}
