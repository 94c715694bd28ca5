"""Bindings of roles to devices, against what any binding must satisfy."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.binding import (
    Binding,
    Demand,
    Unbound,
    bind,
    empty_pools,
    pools_of,
    slots_of,
    unserved,
)
from rollweave.schema.config.engines import PoolConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Device, HostSlot, Resources


def resources(*kinds: str, **labels: float) -> Resources:
    devices = tuple(
        Device(index=index, kind=kind, memory_bytes=1) for index, kind in enumerate(kinds)
    )
    return Resources(cpus=1, memory_bytes=1, devices=devices, labels=labels)


def config(trainer: str = "a", engines: str = "b") -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 1},
            "model": {"path": "m"},
            "tasks": [{"env": "frozenlake"}],
            "cluster": {"address": "10.0.0.1:7400", "hosts": 2},
            "pools": {
                "a": {"resource": "H100"},
                "b": {"resource": "H20", "fallback": ["a"]},
            },
            "trainer": {"pool": trainer},
            "engines": {"pool": engines},
        }
    )


CONFIGURED = config().pools


def test_a_host_belongs_to_pools_by_its_resources_and_its_gpus() -> None:
    assert pools_of(CONFIGURED, resources("NVIDIA H100 80GB HBM3")) == ("a",)
    assert pools_of(CONFIGURED, resources(H20=8, H100=1)) == ("a", "b")
    assert pools_of(CONFIGURED, resources("NVIDIA A100", H2=1)) == ()


def test_a_host_offers_slots_for_each_amount() -> None:
    offered = resources("NVIDIA H100 80GB HBM3", H20=2.5)
    assert slots_of(CONFIGURED, offered) == {"b": 2}
    assert slots_of(CONFIGURED, resources(H20=0.5)) == {"b": 1}
    assert slots_of(CONFIGURED, resources(H20=math.inf)) == {}


@pytest.mark.parametrize(
    ("resource", "kind", "belongs"),
    [
        *(("H20", "NVIDIA H200", False), ("L4", "NVIDIA L40S", False)),
        *(("A10", "NVIDIA A100-SXM4-80GB", False), ("00", "NVIDIA A100-SXM4-80GB", False)),
        *(("A100", "NVIDIA A100-SXM4-80GB", True), ("A100-SXM4", "NVIDIA A100-SXM4-80GB", True)),
        *(("H100 80GB", "NVIDIA H100 80GB HBM3", True), ("NVIDIA L4", "NVIDIA L4", True)),
        ("H.0", "NVIDIA H20", False),
    ],
)
def test_a_resource_is_whole_words_of_a_gpus_name(resource: str, kind: str, belongs: bool) -> None:
    pools = {"a": PoolConfig(resource=resource)}
    assert pools_of(pools, resources(kind)) == (("a",) if belongs else ())


def test_a_pool_without_hosts_is_needed_unless_a_fallback_has_some() -> None:
    empty = empty_pools(CONFIGURED, [resources("NVIDIA H100"), resources()])
    assert [pool.pool for pool in empty] == ["b"]
    assert unserved(config(), empty) == []
    none = empty_pools(CONFIGURED, [resources()])
    assert [pool.pool for pool in unserved(config(), none)] == ["a", "b"]
    assert [pool.pool for pool in unserved(config(engines="a"), none)] == ["a"]


@pytest.mark.parametrize(
    ("present", "text"),
    [
        (
            [resources("NVIDIA H10O"), resources(cpu=1)],
            "must be a resource or GPU of a host (NVIDIA H10O, cpu), got 'H100' "
            "(did you mean H10O?)",
        ),
        ([resources(h100=1)], "(h100), got 'H100' (did you mean h100?)"),
        ([resources("NVIDIA L4")], "(NVIDIA L4), got 'H100'"),
        (
            [resources("NVIDIA H1OO 80GB HBM3")],
            "(NVIDIA H1OO 80GB HBM3), got 'H100' (did you mean H1OO?)",
        ),
        (
            [resources("NVIDIA A100-SXM4-80GB")],
            "(NVIDIA A100-SXM4-80GB), got 'H100' (did you mean A100?)",
        ),
        ([resources()], "(they have none that a pool can ask for), got 'H100'"),
    ],
)
def test_names_the_nearest_resource(present: list[Resources], text: str) -> None:
    pool = empty_pools(CONFIGURED, present)[0]
    assert pool.field == "pools.a.resource"
    assert pool.describe().endswith(text)


def host(number: int, devices: int, *pools: str, cpus: int = 8, **slots: int) -> HostSlot:
    return HostSlot(
        number=number, cpus=cpus, devices=tuple(range(devices)), pools=pools, slots=slots
    )


def engine(number: int, devices: int = 1, *pools: str) -> Demand:
    return Demand(process=f"e{number}", devices=devices, pools=pools)


def rank(number: int, devices: int = 1, *pools: str) -> Demand:
    return Demand(process=f"rank {number}", devices=devices, pools=pools, group="trainer")


def places(bindings: list[Binding]) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {binding.process: (binding.host, binding.devices) for binding in bindings}


def test_each_role_gets_a_gpu_of_its_own() -> None:
    bindings, unbound = bind([rank(0), rank(1), *(engine(n) for n in range(6))], [host(0, 8)])
    assert unbound == []
    assert sorted(binding.devices[0] for binding in bindings) == list(range(8))
    assert not any(binding.shared for binding in bindings)


def test_roles_share_evenly_where_there_are_too_few_devices() -> None:
    bindings, _ = bind([rank(0), *(engine(n) for n in range(4))], [host(0, 2)])
    users = Counter(binding.devices[0] for binding in bindings)
    assert sorted(users.values()) == [2, 3]
    assert [binding.shared for binding in bindings] == [False, False, True, True, True]


def test_hosts_share_evenly_too() -> None:
    bindings, _ = bind([engine(n) for n in range(8)], [host(0, 1), host(1, 1), host(2, 2)])
    users = Counter((binding.host, binding.devices) for binding in bindings)
    assert set(users.values()) == {2}


def test_one_device_serves_all() -> None:
    bindings, _ = bind([rank(0), engine(0), engine(1)], [host(0, 1)])
    assert {binding.devices for binding in bindings} == {(0,)}


def test_ranks_stay_together() -> None:
    hosts = [host(0, 8), host(1, 8)]
    bindings, _ = bind([engine(0), *(rank(n) for n in range(7)), engine(1)], hosts)
    assert len({binding.host for binding in bindings if binding.process.startswith("rank")}) == 1


def test_a_large_demand_finds_a_whole_host() -> None:
    hosts = [host(0, 8), host(1, 8)]
    bindings, unbound = bind([engine(0), engine(1), engine(2, 8), engine(3, 4)], hosts)
    assert unbound == []
    assert not any(binding.shared for binding in bindings)


def test_a_short_pool_uses_its_fallback_before_it_shares() -> None:
    hosts = [host(0, 1, "bandwidth"), host(1, 2, "compute")]
    demands = [engine(n, 1, "bandwidth", "compute") for n in range(4)]
    bindings, _ = bind(demands, hosts)
    expected = {"e0": (0, (0,)), "e1": (1, (0,)), "e2": (1, (1,)), "e3": (0, (0,))}
    assert places(bindings) == expected
    assert [one.pool for one in bindings] == ["bandwidth", "compute", "compute", "bandwidth"]


def test_a_pool_is_not_left_without_a_fallback() -> None:
    hosts = [host(0, 1, "bandwidth"), host(1, 8, "compute")]
    bindings, _ = bind([engine(n, 1, "bandwidth") for n in range(3)], hosts)
    assert {binding.host for binding in bindings} == {0}


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        (engine(0, 4), "no host of this run has 4 devices (the largest host has 2)"),
        (engine(0, 1, "H800"), "no host of pool H800 has 1 devices (the largest host has 2)"),
        (engine(0, 0, "H800"), "there is no host of pool H800"),
    ],
)
def test_what_cannot_be_bound_is_named(demand: Demand, reason: str) -> None:
    assert bind([demand], [host(0, 2, "H20")]) == ([], [Unbound(process="e0", reason=reason)])


def test_roles_on_the_cpu_are_spread_by_cores() -> None:
    hosts = [host(0, 0, cpus=2), host(1, 0, cpus=6)]
    bindings, _ = bind([engine(n, 0) for n in range(8)], hosts)
    assert Counter(binding.host for binding in bindings) == {0: 2, 1: 6}


def test_equal_hosts_take_roles_on_the_cpu_in_turn() -> None:
    hosts = [host(number, 0) for number in range(3)]
    bindings, _ = bind([engine(n, 0) for n in range(7)], hosts)
    assert [binding.host for binding in bindings] == [0, 1, 2, 0, 1, 2, 0]


def test_ranks_on_the_cpu_stay_together_where_slots_allow_it() -> None:
    unlimited = [host(0, 0, "training", cpus=1), host(1, 0, "training")]
    bindings, _ = bind([rank(n, 0, "training") for n in range(3)], unlimited)
    assert {binding.host for binding in bindings} == {0}
    limited = [host(n, 0, "training", training=2) for n in range(2)]
    bindings, _ = bind([rank(n, 0, "training") for n in range(4)], limited)
    assert [binding.host for binding in bindings] == [0, 0, 1, 1]


def test_slots_are_filled_evenly_and_their_fallback_before_they_are_exceeded() -> None:
    hosts = [host(0, 0, "x", cpus=64, x=1), host(1, 0, "x", x=2), host(2, 0, "y", y=1)]
    bindings, _ = bind([engine(n, 0, "x", "y") for n in range(8)], hosts)
    assert [binding.host for binding in bindings] == [0, 1, 1, 2, 0, 1, 1, 0]
    assert [binding.pool for binding in bindings] == [*"xxxyxxxx"]


def test_bound_processes_have_slots_of_their_pool() -> None:
    hosts = [host(0, 0, "x", "y", cpus=64, x=1, y=1), host(1, 0, "x", "y", x=1, y=1)]
    bound = [
        Binding(process="e0", host=0, pool="x"),
        Binding(process="rank 0", host=1, pool="y", group="trainer"),
    ]
    bindings, _ = bind([engine(1, 0, "x"), engine(2, 0, "y")], hosts, bound)
    assert places(bindings) == {"e1": (1, ()), "e2": (0, ())}


def test_a_process_on_a_gpu_takes_no_slot() -> None:
    hosts = [host(0, 8, "x", x=1)]
    bindings, _ = bind([*(engine(n, 1, "x") for n in range(8))], hosts)
    assert not any(binding.shared for binding in bindings)


def test_bound_roles_keep_their_devices() -> None:
    bound = [Binding(process="e0", host=0, devices=(0,)), Binding(process="e9", host=9)]
    bindings, _ = bind([engine(1)], [host(0, 2)], bound)
    assert places(bindings) == {"e1": (0, (1,))}


POOLS = ("x", "y")
HOSTS = st.lists(
    st.tuples(st.integers(0, 8), st.sets(st.sampled_from(POOLS)), st.integers(1, 4)),
    min_size=1,
    max_size=5,
).map(
    lambda drawn: [
        host(n, devices, *sorted(pools), cpus=cpus)
        for n, (devices, pools, cpus) in enumerate(drawn)
    ]
)
DEMANDS = st.lists(
    st.tuples(st.sampled_from([0, 1, 1, 2, 4, 8]), st.permutations(POOLS), st.integers(0, 2)),
    max_size=12,
).map(
    lambda drawn: [
        Demand(process=f"r{n}", devices=devices, pools=tuple(pools[:count]), group="g" * (n % 2))
        for n, (devices, pools, count) in enumerate(drawn)
    ]
)


@given(HOSTS, DEMANDS)
def test_every_binding_is_valid(hosts: list[HostSlot], demands: list[Demand]) -> None:
    bindings, unbound = bind(demands, hosts)
    assert sorted([b.process for b in bindings] + [u.process for u in unbound]) == sorted(
        demand.process for demand in demands
    )
    by_number, by_process = (
        {h.number: h for h in hosts},
        {demand.process: demand for demand in demands},
    )
    for binding in bindings:
        demand, where = by_process[binding.process], by_number[binding.host]
        assert len(set(binding.devices)) == demand.devices == len(binding.devices)
        assert {*binding.devices} <= {*where.devices}
        assert binding.pool in ({*demand.pools} & {*where.pools} if demand.pools else {""})
    users = Counter((b.host, device) for b in bindings for device in b.devices)
    for binding in bindings:
        alone = all(users[binding.host, device] == 1 for device in binding.devices)
        assert alone or binding.shared or any(other.shared for other in bindings)
    for missing in unbound:
        demand = by_process[missing.process]
        assert not any(
            len(h.devices) >= demand.devices and (not demand.pools or {*demand.pools} & {*h.pools})
            for h in hosts
        )


@given(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=16), st.integers(1, 4))
def test_powers_of_two_share_only_if_they_must(sizes: list[int], count: int) -> None:
    """Among hosts of eight devices first come, first served by size wastes none."""
    hosts = [host(n, 8) for n in range(count)]
    bindings, unbound = bind([engine(n, size) for n, size in enumerate(sizes)], hosts)
    assert unbound == []
    assert any(binding.shared for binding in bindings) == (sum(sizes) > 8 * count)


@given(HOSTS, DEMANDS, st.data())
def test_a_rebinding_moves_nothing_that_is_bound(
    hosts: list[HostSlot], demands: list[Demand], data: st.DataObject
) -> None:
    """After the loss of a host, what was elsewhere stays, and what finds a place is on
    a host that is left.
    """
    bindings, _ = bind(demands, hosts)
    gone = data.draw(st.sampled_from(hosts)).number
    left = [h for h in hosts if h.number != gone]
    stay = [binding for binding in bindings if binding.host != gone]
    moving = [d for d in demands if d.process not in {binding.process for binding in stay}]
    moved, _ = bind(moving, left, stay)
    assert not any(binding.host == gone for binding in moved)
    taken = {(b.host, device) for b in stay for device in b.devices}
    for binding in moved:
        if not binding.shared:
            assert not taken & {(binding.host, device) for device in binding.devices}
