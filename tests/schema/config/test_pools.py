"""Pools that a configuration names."""

from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"cluster": None}, "pools must be left out without"),
        (
            {"trainer": {"pool": "compte"}},
            r"trainer.pool must be one of the pools .*, got 'compte' \(did you mean compute\?\)",
        ),
        ({"engines": [{}, {"pool": "x"}]}, r"engines.1.pool must be one of .*, got 'x'"),
        (
            {"pools": {"a": {"resource": "H20", "fallback": ["b"]}}},
            r"pools.a.fallback must be one of the pools \['a'\], got 'b'",
        ),
        (
            {"tasks": [{"env": "a", "pool": "bandwith"}], "engines": ENGINES},
            r"tasks.0.pool must be .*, got 'bandwith' \(did you mean bandwidth\?\)",
        ),
        (
            {"tasks": [{"env": "a", "pool": "bandwidth"}], "engines": [{"pool": "compute"}, {}]},
            r"tasks.0.pool must be one of the pools of engines \['compute'\], got 'bandwidth'",
        ),
        (
            {
                "tasks": [{"env": "a", "pool": "compute"}],
                "engines": ENGINES,
                "rollout": {"mode": "decoupled"},
            },
            "tasks.0.pool must be left out in mode decoupled, in which engines launch",
        ),
        (
            {"engines": ENGINES, "rollout": {"affinity": "learned", "mode": "decoupled"}},
            "rollout.affinity must be declared in mode decoupled",
        ),
        (
            {"engines": [{"pool": "compute"}, {}], "rollout": {"affinity": "learned"}},
            r"rollout.affinity must be declared unless .* got learned with \['compute', None\]",
        ),
        (
            {"engines": [{"pool": "compute"}] * 2, "rollout": {"affinity": "learned"}},
            "rollout.affinity must be declared unless each group of engines names a pool",
        ),
        (
            {"tasks": [{"env": "a", "pool": "compute", "pin": True}], "engines": ENGINES},
            "tasks.0.pin must be left out unless rollout.affinity is learned",
        ),
        (
            {
                "tasks": [{"env": "a", "pin": True}],
                "engines": ENGINES,
                "rollout": {"affinity": "learned"},
            },
            "tasks.0.pin must be left out unless .* tasks.0.pool is given, got True",
        ),
        ({"cluster": {"address": "nowhere", "hosts": 1}}, "be an address and a port"),
        ({"model": {"path": "m", "device": "cuda:1"}}, "'auto', 'cpu' or 'cuda'"),
        ({"weights": {"relays": 1}}, "weights.relays must be left out with"),
    ],
)
def test_refuses_pools_that_do_not_fit(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**sections)


def test_the_address_of_a_cluster_has_a_host_and_a_port() -> None:
    cluster = config(cluster={"address": "[fe80::1]:80", "hosts": 1}).cluster
    assert cluster is not None
    assert (cluster.host, cluster.port) == ("fe80::1", 80)
