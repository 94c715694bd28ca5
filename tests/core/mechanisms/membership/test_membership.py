"""The engines that a world begins with, and which may join or leave it."""

from typing import Any

import pytest

from rollweave.core import engines
from rollweave.core.mechanisms.membership import members
from rollweave.core.mechanisms.membership.members import engines_to_start, first_engines
from rollweave.core.state import Engine, Phase, Seat, State
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import EngineSlot
from tests.support.core import config
from tests.support.states import place_on_hosts, running


def engine(number: int, **fields: Any) -> Engine:
    seat = Seat(**{name: fields.pop(name) for name in ("degree", "group") if name in fields})
    return Engine(id=EngineId(f"e{number}"), seat=seat, **fields)


def state_of(*listed: Engine, next_number: int = 0) -> State:
    state = State(engines={one.id: one for one in listed})
    state.membership.next_number = next_number
    place_on_hosts(state, 0)
    return state


def grouped(*counts: int) -> RunConfig:
    """Engines in groups of these counts, of degree 1, 2 and so on."""
    one = config("bounded").engines[0]
    groups = [
        one.model_copy(update={"count": count, "degree": degree})
        for degree, count in enumerate(counts, start=1)
    ]
    return config("bounded").model_copy(update={"engines": groups})


def planned(budget: int, least: int = 1) -> RunConfig:
    sections: dict[str, Any] = {"allocation": {"budget": budget}}
    made = config("bounded", rollout={"scheduling": "trajectory"}, **sections)
    groups = tuple(group.model_copy(update={"degree": least}) for group in made.engines)
    return made.model_copy(update={"engines": groups})


def described(slots: tuple[EngineSlot, ...]) -> list[tuple[str, int, int]]:
    return [(slot.id, slot.degree, slot.group) for slot in slots]


def test_the_first_engines_are_numbered_through_the_groups() -> None:
    assert described(first_engines(grouped(2, 1))) == [("e0", 1, 0), ("e1", 1, 0), ("e2", 2, 1)]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(7, [4, 2, 1]), (8, [4, 2, 1, 1]), (5, [2, 1, 1, 1]), (3, [2, 1]), (2, [1, 1])],
)
def test_a_planned_fleet_begins_with_one_of_each_degree(budget: int, expected: list[int]) -> None:
    assert [slot.degree for slot in first_engines(planned(budget))] == expected


def test_a_world_begins_without_those_that_left_and_with_those_that_joined() -> None:
    state = state_of(
        engine(0), engine(1, leaving=True), engine(3, joined=True, group=1), next_number=5
    )
    state.membership.withdrawn = [EngineId("e2")]
    assert described(engines_to_start(grouped(2, 1), state)) == [("e0", 1, 0), ("e3", 2, 1)]
    state.engines[EngineId("e3")].leaving = True
    assert described(engines_to_start(grouped(2, 1), state)) == [("e0", 1, 0)]
    state.membership.withdrawn = [EngineId("e0"), EngineId("e2")]
    assert engines_to_start(grouped(2, 1), state) == first_engines(grouped(2, 1)), "never none"


def test_an_engine_that_joined_gets_another_name_if_the_configuration_has_grown() -> None:
    state = state_of(engine(1, joined=True), engine(2, joined=True), next_number=3)
    expected = [("e0", 1, 0), ("e1", 1, 0), ("e3", 1, 0), ("e2", 1, 0)]
    assert described(engines_to_start(grouped(2), state)) == expected
    assert [slot.id for slot in engines_to_start(grouped(5), state)][5:] == ["e5", "e6"]


def test_an_engine_of_a_group_that_is_gone_joins_the_first() -> None:
    state = state_of(engine(3, joined=True, group=1), next_number=4)
    assert described(engines_to_start(grouped(1), state))[1:] == [("e3", 1, 0)]


def test_a_planned_fleet_continues_as_it_was_or_was_to_be() -> None:
    state = state_of(engine(4, degree=2), engine(5, degree=1, draining=True), next_number=7)
    state.membership.pending_degrees = [1, 2]
    expected = [("e4", 2, 0), ("e7", 1, 0), ("e8", 2, 0)]
    assert described(engines_to_start(planned(5), state)) == expected
    for run_config in (planned(4), planned(8, least=4)):
        assert engines_to_start(run_config, state) == first_engines(run_config), "it fits no longer"
    assert engines_to_start(planned(5), State()) == first_engines(planned(5))


def test_the_next_engine_has_a_number_that_none_had() -> None:
    assert members.next_id(state_of(next_number=3)) == "e3"


def test_who_may_not_join() -> None:
    def refusal(state: State, number: int = 3, group: int = 0) -> str:
        slot = EngineSlot(id=EngineId(f"e{number}"), group=group)
        return members.why_not_join(grouped(1, 1), state, slot)

    assert refusal(state_of(next_number=3)) == ""
    assert refusal(state_of(next_number=3), group=1) == ""
    assert "no group 2" in refusal(state_of(next_number=3), group=2)
    assert "was the name of another engine" in refusal(state_of(next_number=4))
    state = state_of(next_number=3)
    state.hosts.up.clear()
    assert refusal(state) == "no host is up"
    state.phase = Phase.FINISHED
    assert refusal(state, 4) == "the run is over"
    attached = grouped(1, 1)
    attached.engines[0] = attached.engines[0].model_copy(update={"address": ("http://a:1",)})
    slot = EngineSlot(id=EngineId("e3"))
    taken = state_of(engine(0), next_number=3)
    assert "1 servers, each with an engine" in members.why_not_join(attached, taken, slot)
    assert members.why_not_join(attached, state_of(next_number=3), slot) == ""
    slot = EngineSlot(id=EngineId("e9"))
    assert "[allocation] decides" in members.why_not_join(planned(5), State(), slot)


def test_who_may_not_leave() -> None:
    def refusal(*others: Engine, version: int = 1) -> str:
        own = engine(0, version=version)
        return members.why_not_leave(grouped(2), state_of(own, *others), own)

    assert refusal(engine(1, version=1)) == ""
    assert refusal() == "e0 is the last engine"
    assert refusal(engine(1, version=1, leaving=True)) == "e0 is the last engine"
    assert refusal(engine(1, version=1, draining=True)) == "e0 is the last engine"
    assert "the only engine that has weights" in refusal(engine(1))
    assert "the only engine that has weights" in refusal(engine(1), version=0)
    assert refusal(engine(1, version=0)) == ""
    assert refusal(engine(1), version=-1) == ""
    own = engine(0)
    assert "[allocation] decides" in members.why_not_leave(planned(5), State(), own)


def test_a_world_without_an_engine_that_was_leaving_counts_its_departure() -> None:
    run = running()
    state = run.state
    state.engines = {one.id: one for one in (engine(0), engine(1, leaving=True), engine(2))}
    state.engines[EngineId("e2")].leaving = True
    state.membership.withdrawn = [EngineId("e0")]
    engines.start(run, (EngineSlot(id=EngineId("e0")), EngineSlot(id=EngineId("e2"))))
    assert state.counters.engines_left == 1
    expected = [("e0", False, False), ("e2", False, True)]
    assert [(one.id, one.leaving, one.joined) for one in state.engines.values()] == expected
    assert state.membership.withdrawn == ["e1"], "it has gone for good"
    assert state.membership.next_number == 3


def test_hosts_take_the_first_engines_in_turn() -> None:
    run_config = config("bounded", engines={"count": 5}, weights={"relays": 3})
    assert [slot.host for slot in first_engines(run_config)] == [0, 1, 2, 0, 1]


def test_the_number_of_an_engine() -> None:
    assert members.number_of(EngineId("e17")) == 17
