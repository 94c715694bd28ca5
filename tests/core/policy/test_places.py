"""How many attempts may enter INIT, RUN and EVAL."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.policy.places import (
    BACKLOG,
    Taken,
    is_backlogged,
    most_rolled_out,
    room_in_eval,
    room_in_init,
    room_in_run,
)
from rollweave.schema.config.rollout import Places, RolloutConfig
from tests.support.properties import examples

COUNT = st.integers(0, 9)
SIZE = st.integers(1, 6)


def greatest(places: Places, taken: Taken, stage: str) -> int:
    """Admit one attempt after the other to a stage, until one breaks a rule."""
    count = 0
    while True:
        now = taken._replace(**{stage: getattr(taken, stage) + count + 1})
        broken = {
            "init": now.init > places.init
            or now.init + now.ready > 2 * places.init
            or now.init + now.ready + now.run > places.alive
            or now.rolled_out >= BACKLOG * places.run + max(0, places.eval - now.eval),
            "run": now.run > places.run,
            "eval": now.eval > places.eval,
        }
        if broken[stage]:
            return count
        count += 1


@settings(max_examples=examples(500))
@given(
    places=st.builds(Places, init=SIZE, run=SIZE, eval=SIZE, alive=SIZE),
    taken=st.builds(Taken, init=COUNT, ready=COUNT, run=COUNT, rolled_out=COUNT, eval=COUNT),
)
def test_as_many_may_enter_as_break_no_rule(places: Places, taken: Taken) -> None:
    assert room_in_init(places, taken) == greatest(places, taken, "init")
    assert room_in_run(places, taken) == greatest(places, taken, "run")
    assert room_in_eval(places, taken) == greatest(places, taken, "eval")


@given(init=SIZE, run=SIZE, eval_=SIZE)
def test_a_world_remembers_all_that_may_wait_for_their_rewards(
    init: int, run: int, eval_: int
) -> None:
    sizes = {"init": init, "run": run, "eval": eval_}
    for running in (run, sizes):
        places = RolloutConfig.model_validate({"max_running": running}).places
        full = next(
            count
            for count in range(10_000)
            if is_backlogged(places, Taken(init=0, ready=0, run=0, rolled_out=count, eval=0))
        )
        assert full - 1 + places.alive < most_rolled_out(places)


def test_one_number_is_the_size_of_all_pools_together() -> None:
    assert RolloutConfig(max_running=5).places == Places(init=5, run=5, eval=5, alive=5)


def test_in_mode_decoupled_every_started_environment_has_a_place_of_run() -> None:
    sizes = {"init": 4, "run": 6, "eval": 2}
    bounded = RolloutConfig.model_validate({"mode": "bounded", "max_running": sizes})
    decoupled = RolloutConfig.model_validate({"mode": "decoupled", "max_running": sizes})
    assert bounded.places == Places(init=4, run=6, eval=2, alive=14)
    assert decoupled.places == Places(init=4, run=6, eval=2, alive=6)
