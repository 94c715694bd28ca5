"""The engine of a suspect, compared with an obvious choice."""

from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.mechanisms.suspects import (
    MOST_EXCUSED,
    engine_for_suspect,
    excuses,
    may_isolate,
)
from rollweave.core.policy.routing import EngineLoad
from rollweave.schema.base import EngineId

IDS = st.sets(st.sampled_from([EngineId(f"e{at}") for at in range(5)]))


@st.composite
def loads(draw: st.DrawFn) -> list[EngineLoad]:
    return [
        EngineLoad(
            id=name,
            active=draw(st.integers(0, 3)),
            slots=draw(st.integers(1, 3)),
            tokens=draw(st.integers(0, 3)),
            borrowed=draw(st.booleans()),
        )
        for name in sorted(draw(IDS))
    ]


@given(engines=loads(), avoid=IDS, isolating=IDS)
def test_a_suspect_goes_where_it_harms_least(
    engines: list[EngineLoad], avoid: set[EngineId], isolating: set[EngineId]
) -> None:
    """That is an engine that was not lost with it, if there is one, and one that serves
    no users, though others may have fewer turns.
    """
    chosen = engine_for_suspect(engines, avoid=avoid, isolating=isolating)
    kind = [one for one in engines if not one.borrowed] or engines
    kind = [one for one in kind if one.id not in avoid] or kind
    free = [one for one in kind if one.id not in isolating]
    assert (chosen is None) is not bool(free)
    if chosen is not None:
        (taken,) = [one for one in free if one.id == chosen]
        assert all((taken.active, taken.tokens) <= (one.active, one.tokens) for one in free)


def test_few_engines_run_suspects_and_one_always_may() -> None:
    most = {
        engines: max(
            count + 1 for count in range(9) if may_isolate(isolating=count, engines=engines)
        )
        for engines in (0, 1, 2, 4, 7, 8, 16)
    }
    assert most == {0: 1, 1: 1, 2: 1, 4: 1, 7: 1, 8: 2, 16: 4}


def test_an_engine_that_only_its_own_turns_blame_is_at_fault_in_the_end() -> None:
    assert excuses(elsewhere=True, excused=10**6)
    assert [excuses(elsewhere=False, excused=count) for count in (0, MOST_EXCUSED - 1)] == [
        True
    ] * 2
    assert not excuses(elsewhere=False, excused=MOST_EXCUSED)
