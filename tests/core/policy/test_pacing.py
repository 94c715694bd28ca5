"""Modes, staleness, capacity, completion, mixture, routing, retry: each against its
sentence in plain Python.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.policy.mixture import next_domain
from rollweave.core.policy.modes import Mode, Update, preset, update_now
from rollweave.core.policy.redundancy import Verdict, capacity, group_verdict, pool_room
from rollweave.core.policy.retry import RETRYABLE, WORLDS, Failover, failover, try_again
from rollweave.core.policy.routing import EngineLoad, choose
from rollweave.core.policy.staleness import acceptable, staleness
from rollweave.schema.base import EngineId
from rollweave.schema.config.sections import ModeName
from rollweave.schema.work import TRAINABLE, StopReason
from tests.support.properties import examples


def test_the_presets_are_those_of_the_design() -> None:
    assert preset(ModeName.SYNC, 9) == Mode(window=0, update=Update.AT_ONCE)
    assert preset(ModeName.ONE_STEP, 9) == Mode(window=1, update=Update.ROLLED_OUT)
    assert preset(ModeName.STREAM, 9) == Mode(window=1, update=Update.ROLLED_OUT, streamed=True)
    assert preset(ModeName.PARTIAL, 9) == Mode(window=9, update=Update.AT_ONCE, aborts=False)
    assert preset(ModeName.BOUNDED, 9) == Mode(window=9, update=Update.AT_ONCE)


@pytest.mark.parametrize(
    ("update", "batch_ready", "in_flight", "too_old", "expected"),
    [
        (Update.AT_ONCE, False, 5, False, True),
        (Update.ROLLED_OUT, False, 5, False, False),
        (Update.ROLLED_OUT, False, 0, False, True),
        (Update.ROLLED_OUT, True, 5, False, True),
        (Update.ROLLED_OUT, False, 5, True, True),
    ],
)
def test_when_engines_take_new_weights(
    update: Update, batch_ready: bool, in_flight: int, too_old: bool, expected: bool
) -> None:
    mode = Mode(window=1, update=update)
    assert (
        update_now(mode, batch_ready=batch_ready, in_flight=in_flight, too_old=too_old) is expected
    )


@given(initiated=st.integers(0, 50), trained_at=st.integers(0, 50), window=st.integers(0, 5))
def test_staleness_is_the_distance_between_the_versions(
    initiated: int, trained_at: int, window: int
) -> None:
    assert acceptable(initiated, trained_at, window) == (staleness(initiated, trained_at) <= window)
    assert staleness(initiated, trained_at) == staleness(trained_at, initiated)
    assert acceptable(initiated, initiated, window)


@settings(max_examples=examples(300))
@given(
    window=st.integers(0, 4),
    serving=st.integers(0, 8),
    following=st.integers(0, 8),
    batch=st.integers(1, 5),
    last=st.integers(1, 9),
)
def test_capacity_admits_exactly_the_groups_that_can_still_be_trained_in_time(
    window: int, serving: int, following: int, batch: int, last: int
) -> None:
    """The slow reference: walk through the batches ahead, group by group, until one
    would be too stale or too late.
    """
    slow = 0
    while acceptable(serving, following, window):
        trained_at = following + slow // batch
        if trained_at - serving > window or trained_at >= last:
            break
        slow += 1
    fast = capacity(
        window=window,
        serving_version=serving,
        next_version=following,
        groups_per_step=batch,
        spare_groups=0,
        last_step=last,
    )
    assert fast == slow
    spare = capacity(
        window=window,
        serving_version=serving,
        next_version=following,
        groups_per_step=batch,
        spare_groups=2,
        last_step=last,
    )
    assert spare == (fast + 2 if fast else 0)


@settings(max_examples=examples(300))
@given(
    free_capacity=st.integers(0, 20),
    waiting=st.integers(0, 12),
    running=st.integers(0, 12),
    group_size=st.integers(1, 4),
    active=st.integers(0, 5),
    buffered=st.integers(0, 5),
    buffer_capacity=st.integers(0, 20),
    next_version=st.integers(0, 5),
    groups_per_step=st.integers(1, 4),
    last_step=st.integers(1, 6),
)
def test_the_pool_is_filled_while_buffer_and_steps_have_room(**given: int) -> None:
    """The slow reference: draw group by group."""
    size = given["group_size"]
    in_flight = -(-(given["waiting"] + given["running"]) // size)
    trained = (given["last_step"] - given["next_version"]) * given["groups_per_step"]
    slow = 0
    while (
        given["waiting"] + slow * size < given["free_capacity"]
        and given["buffered"] + in_flight + slow < given["buffer_capacity"]
        and given["active"] + given["buffered"] + slow < trained
    ):
        slow += 1
    assert pool_room(**given) == slow


@pytest.mark.parametrize(
    ("rewards", "pending", "dynamic", "expected"),
    [
        ([], 4, False, Verdict.WAIT),
        ([1.0, 0.0, 1.0], 1, False, Verdict.WAIT),
        ([1.0, 0.0, 1.0, 0.0], 3, False, Verdict.COMPLETE),
        ([1.0, 0.0], 0, False, Verdict.COMPLETE),
        ([1.0], 0, False, Verdict.INCOMPLETE),
        ([], 0, True, Verdict.INCOMPLETE),
        ([1.0] * 4, 0, True, Verdict.FILTERED),
        ([1.0] * 4, 0, False, Verdict.COMPLETE),
        ([1.0, 1.0, 1.0, 0.9], 0, True, Verdict.COMPLETE),
    ],
)
def test_group_verdict(
    rewards: list[float], pending: int, dynamic: bool, expected: Verdict
) -> None:
    verdict = group_verdict(
        rewards, pending=pending, group_size=4, min_members=2, dynamic_sampling=dynamic
    )
    assert verdict is expected


@given(weights=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4), count=st.integers(1, 200))
def test_each_domain_gets_its_share(weights: list[float], count: int) -> None:
    domains = [(f"d{index}", weight) for index, weight in enumerate(weights)]
    drawn: dict[str, int] = {}
    for _ in range(count):
        name = next_domain(domains, drawn)
        drawn[name] = drawn.get(name, 0) + 1
    for name, weight in domains:
        assert abs(drawn.get(name, 0) - count * weight / sum(weights)) < len(weights)


def test_a_domain_without_groups_lags_like_one_with_none() -> None:
    assert next_domain([("a", 1.0), ("b", 1.0)], {"b": 0}) == "a"
    assert next_domain([("a", 1.0), ("b", 1.0)], {"a": 1}) == "b"
    assert next_domain([("a", 1.0), ("b", 3.0)], {}) == "b"


loads = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 9)), min_size=0, max_size=5
).map(
    lambda found: [
        EngineLoad(
            id=EngineId(f"e{index}"),
            active=min(active, slots),
            slots=slots,
            tokens=min(active, slots) * tokens,
        )
        for index, (active, slots, tokens) in enumerate(found)
    ]
)


@given(
    engines=loads,
    affine=st.integers(0, 5),
    avoid=st.sets(st.integers(0, 5)),
    placement=st.sampled_from(["affinity", "least_load"]),
)
def test_routing_prefers_affinity_then_the_least_load_and_never_overfills(
    engines: list[EngineLoad], affine: int, avoid: set[int], placement: str
) -> None:
    avoided = [EngineId(f"e{index}") for index in sorted(avoid)]
    known = {engine.id: engine for engine in engines}
    chosen = choose(known, affine=EngineId(f"e{affine}"), avoid=avoided, placement=placement)
    free = {engine.id: engine for engine in engines if engine.active < engine.slots}
    if not free:
        assert chosen is None
        return
    assert chosen in free
    good = {name: engine for name, engine in free.items() if name not in avoided} or free
    assert chosen in good
    if avoid and not free.keys() - avoided and f"e{affine}" in free:
        assert chosen == f"e{affine}", "its cache, where all have failed the turn"
    elif placement == "least_load":
        assert good[chosen].active / good[chosen].slots == min(
            e.active / e.slots for e in good.values()
        )
    elif f"e{affine}" in good:
        assert chosen == f"e{affine}"
    else:
        assert good[chosen].tokens / good[chosen].slots == min(
            e.tokens / e.slots for e in good.values()
        )


def test_only_failures_that_say_nothing_about_the_agent_are_tried_again() -> None:
    assert not RETRYABLE & TRAINABLE
    assert try_again(StopReason.ENV_ERROR, attempt=1, retries=2)
    assert not try_again(StopReason.ENV_ERROR, attempt=2, retries=2)
    assert try_again(StopReason.WORLD_LOST, attempt=99, retries=0, worlds=WORLDS - 1)
    assert not try_again(StopReason.WORLD_LOST, attempt=0, retries=99, worlds=WORLDS)
    # the same words twice are a bug where they are an error, and nothing new where they
    # are a wait
    for reason in StopReason:
        once, twice = (
            try_again(reason, attempt=1, retries=9, repeated=repeated) for repeated in (False, True)
        )
        assert once == twice or reason in (StopReason.ENV_ERROR, StopReason.REWARD_ERROR)
    assert not try_again(StopReason.REWARD_ERROR, attempt=1, retries=9, repeated=True)
    for reason in (
        StopReason.FINISHED,
        StopReason.STALE,
        StopReason.SURPLUS,
        StopReason.CANCELLED,
        StopReason.TIME_BUDGET,
    ):
        assert not try_again(reason, attempt=0, retries=2)


@pytest.mark.parametrize(
    ("restarts", "elsewhere", "expected"),
    [
        (0, 0, Failover.RESTART),
        (2, 5, Failover.RESTART),
        (3, 5, Failover.EVICT_MACHINE),
        (4, 1, Failover.EVICT_MACHINE),
        (3, 0, Failover.REMOVE_ENGINE),
    ],
)
def test_a_machine_goes_when_restarts_do_not_help_and_others_can_go_on(
    restarts: int, elsewhere: int, expected: Failover
) -> None:
    assert failover(restarts=restarts, limit=3, elsewhere=elsewhere) is expected


def test_counts_of_failures_are_not_negative() -> None:
    with pytest.raises(ValueError, match="restarts must be at least 0, got -1"):
        failover(restarts=-1, limit=3, elsewhere=0)
