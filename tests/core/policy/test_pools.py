"""Hosts belong to pools by their resources, and errors about a pool without hosts
suggest others.
"""

import math

import pytest

from rollweave.core.policy.pools import empty_pools, pools_of, slots_of, unserved
from rollweave.schema.config.cluster import PoolConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Device, Resources


def host(*kinds: str, **labels: float) -> Resources:
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


POOLS = config().pools


def test_a_host_belongs_to_pools_by_its_resources_and_its_gpus() -> None:
    assert pools_of(POOLS, host("NVIDIA H100 80GB HBM3")) == ("a",)
    assert pools_of(POOLS, host(H20=8, H100=1)) == ("a", "b")
    assert pools_of(POOLS, host("NVIDIA A100", H2=1)) == ()


def test_a_host_offers_slots_for_each_amount() -> None:
    offered = host("NVIDIA H100 80GB HBM3", H20=2.5)
    assert slots_of(POOLS, offered) == {"b": 2}
    assert slots_of(POOLS, host(H20=0.5)) == {"b": 1}
    assert slots_of(POOLS, host(H20=math.inf)) == {}


@pytest.mark.parametrize(
    ("resource", "kind", "belongs"),
    [
        ("H20", "NVIDIA H200", False),
        ("L4", "NVIDIA L40S", False),
        ("A10", "NVIDIA A100-SXM4-80GB", False),
        ("00", "NVIDIA A100-SXM4-80GB", False),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("A100-SXM4", "NVIDIA A100-SXM4-80GB", True),
        ("H100 80GB", "NVIDIA H100 80GB HBM3", True),
        ("NVIDIA L4", "NVIDIA L4", True),
        ("H.0", "NVIDIA H20", False),
    ],
)
def test_a_resource_is_whole_words_of_a_gpus_name(resource: str, kind: str, belongs: bool) -> None:
    pools = {"a": PoolConfig(resource=resource)}
    assert pools_of(pools, host(kind)) == (("a",) if belongs else ())


def test_a_pool_without_hosts_is_needed_unless_a_fallback_has_some() -> None:
    empty = empty_pools(POOLS, [host("NVIDIA H100"), host()])
    assert [pool.pool for pool in empty] == ["b"]
    assert unserved(config(), empty) == []
    none = empty_pools(POOLS, [host()])
    assert [pool.pool for pool in unserved(config(), none)] == ["a", "b"]
    assert [pool.pool for pool in unserved(config(engines="a"), none)] == ["a"]


@pytest.mark.parametrize(
    ("present", "text"),
    [
        (
            [host("NVIDIA H10O"), host(cpu=1)],
            "must be a resource or GPU of a host (NVIDIA H10O, cpu), got 'H100' "
            "(did you mean H10O?)",
        ),
        ([host(h100=1)], "(h100), got 'H100' (did you mean h100?)"),
        ([host("NVIDIA L4")], "(NVIDIA L4), got 'H100'"),
        (
            [host("NVIDIA H1OO 80GB HBM3")],
            "(NVIDIA H1OO 80GB HBM3), got 'H100' (did you mean H1OO?)",
        ),
        (
            [host("NVIDIA A100-SXM4-80GB")],
            "(NVIDIA A100-SXM4-80GB), got 'H100' (did you mean A100?)",
        ),
        ([host()], "(they have none that a pool can ask for), got 'H100'"),
    ],
)
def test_names_the_nearest_resource(present: list[Resources], text: str) -> None:
    pool = empty_pools(POOLS, present)[0]
    assert pool.field == "pools.a.resource"
    assert pool.describe().endswith(text)
