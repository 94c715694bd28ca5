"""Pools that a configuration names."""

from typing import Any

from rollweave.schema.config.root import RunConfig

POOLS = {
    "compute": {"resource": "H800"},
    "bandwidth": {"resource": "H20", "fallback": ["compute"]},
}


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 1},
            "model": {"path": "m"},
            "tasks": [{"env": "frozenlake"}],
            "cluster": {"address": "10.0.0.1:7400", "hosts": 2},
            "pools": POOLS,
            **sections,
        }
    )


ENGINES = [{"pool": "compute"}, {"pool": "bandwidth"}]
"""Groups of engines of both pools."""


def test_a_role_uses_its_pool_and_then_the_fallbacks() -> None:
    run = config(trainer={"pool": "compute"}, engines={"pool": "bandwidth"})
    assert run.pools_of(run.trainer.pool) == ("compute",)
    assert run.pools_of(run.engines[0].pool) == ("bandwidth", "compute")
    assert run.pools_of(None) == ()


def test_the_address_of_a_cluster_has_a_host_and_a_port() -> None:
    cluster = config(cluster={"address": "[fe80::1]:80", "hosts": 1}).cluster
    assert cluster is not None
    assert (cluster.host, cluster.port) == ("fe80::1", 80)
