"""The state of a run as viewers show it: every attempt waits for exactly one thing."""

import msgspec
import pytest

from rollweave.core.policy.waiting import Wait
from rollweave.schema.base import as_json
from rollweave.schema.status import RunStatus
from tests.support.core import config
from tests.support.random_world import BEGIN_S, World


@pytest.mark.parametrize("mode", ["sync", "bounded", "decoupled"])
@pytest.mark.parametrize("seed", [3, 4])
def test_every_attempt_waits_for_one_thing(mode: str, seed: int) -> None:
    world = World(config(mode, steps=3), seed, failure=0.05)
    world.start()
    seen: set[str] = set()
    while not world.core.finished:
        world.step()
        status = world.core.status(world.now)
        waiting = [wait for wait in status.waits if wait.waiter == "attempts"]
        assert sum(wait.count for wait in waiting) == sum(status.attempts.values())
        for wait in status.waits:
            assert wait.count >= 1
            assert 0 <= wait.seconds <= world.now - BEGIN_S
            if wait.waiter == "attempts":
                assert wait.oldest in world.core.state.trajectories
        seen |= {wait.target for wait in status.waits}
        assert msgspec.json.decode(as_json(status), type=RunStatus) == status
    for beginning in ("rewards of", "environments of", "engine e", "the batch of step"):
        assert any(target.startswith(beginning) for target in seen), seen
    assert world.core.status(world.now).waits == ()


def test_the_waits_for_components_come_with_their_seconds() -> None:
    world = World(config(), 3)
    world.start()
    waits = [
        Wait(component="image a", what="downloading", since=world.now - 7.0, usual_s=2.0),
        Wait(component="image b", what="downloading"),
    ]
    first, second, *_ = world.core.status(world.now, waits).waits
    assert (first.target, first.seconds, first.usual_s) == ("image a", 7.0, 2.0)
    assert (second.target, second.seconds) == ("image b", 0.0)
