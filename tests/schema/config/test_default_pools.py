"""The pools of processes that name none (RollArt §5.2)."""

from typing import Any

import pytest

from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import DEFAULT_POOLS

POOLS = {name: {"resource": name.upper()} for name in ("compute", "bandwidth", "cpu", "local")}


def config(pools: Any = POOLS, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "a", "steps": 1},
            "model": {"scratch": {"hidden": 32}},
            "tasks": [{"env": "frozenlake"}],
            "cluster": {"address": "a:1", "hosts": 1},
            "pools": pools,
            "workers": {"count": 2},
            "roles": {"judge": {"cls": "a:B"}},
            **sections,
        }
    )


def pools_of(config: RunConfig) -> list[str | None]:
    engines = [group.pool for group in config.engines]
    roles = [role.pool for role in config.roles.values()]
    return [config.trainer.pool, *engines, config.workers.pool, *roles]


def test_processes_that_name_no_pool_have_that_of_their_hardware() -> None:
    assert pools_of(config()) == list(DEFAULT_POOLS.values())
    assert pools_of(config(engines=[{"pool": "compute"}, {}], trainer={"pool": "cpu"})) == [
        *("cpu", "compute", "bandwidth"),
        *("cpu", "local"),
    ]
    again = RunConfig.model_validate(config().model_dump())
    assert again == config()


@pytest.mark.parametrize("sections", [{"pools": {}}, {"pools": {"gpus": {"resource": "H20"}}}])
def test_without_such_a_pool_any_host_will_do(sections: dict[str, Any]) -> None:
    assert pools_of(config(**sections)) == [None] * 4


def test_a_pool_is_not_chosen_for_what_is_not_there_or_shared() -> None:
    assert config(workers={}).workers.pool is None
    colocated = config(trainer={"colocated": True}, rollout={"mode": "sync"})
    assert pools_of(colocated) == [None] * 4
