"""Long waits are named when they are unusual, and again at growing intervals."""

from rollweave.core.policy.waiting import FIRST_S, SHOWN, LongWaits, Wait, wait_lines


def seconds_named(wait: Wait, until: int) -> list[int]:
    waits = LongWaits()
    return [now for now in range(until) if waits.due(float(now), [wait])]


def test_a_wait_is_named_whenever_it_has_doubled() -> None:
    expected = [10, 20, 40, 80]
    assert seconds_named(Wait(component="relay r1", what="starting", since=0.0), 100) == expected


def test_a_wait_without_a_beginning_begins_when_it_is_first_seen() -> None:
    waits, wait = LongWaits(), Wait(component="another host", what="no place")
    assert waits.due(100.0, [wait]) == []
    assert waits.due(100.0 + FIRST_S, [wait]) == [(wait, FIRST_S)]
    assert waits.due(150.0, []) == []
    assert waits.due(151.0, [wait]) == [], "it is another wait"


def test_a_wait_that_is_usually_long_is_named_later() -> None:
    training = Wait(component="the trainer", what="training step 7", since=0.0, usual_s=30.0)
    assert seconds_named(training, 200) == [60, 120]


def test_progress_does_not_make_another_wait() -> None:
    waits = LongWaits()
    for now in range(40):
        wait = Wait(component="relay r1", what=f"{now} of 40 MB", since=0.0)
        named = waits.due(float(now), [wait])
        assert bool(named) == (now in (10, 20))
    assert wait_lines([(wait, 39.4)]) == [
        ("relay r1", "waiting 39 s for relay r1: 39 of 40 MB"),
    ]


def test_the_waits_of_a_large_fleet_take_few_lines() -> None:
    fleet = [(Wait(component=f"engine e{n}", what="starting"), 10.0 + n) for n in range(64)]
    lines = wait_lines(fleet)
    assert len(lines) == SHOWN + 1
    assert lines[-1] == ("others", "waiting up to 73 s for 56 others: engine e8 … engine e63")
