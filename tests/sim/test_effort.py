"""The share of a search that is done grows to one, whatever its rounds are."""

from hypothesis import given
from hypothesis import strategies as st

from rollweave.sim.effort import Effort

ROUNDS = st.lists(
    st.tuples(st.lists(st.integers(1, 20), max_size=6), st.integers(0, 200)), min_size=1, max_size=6
)


@given(rounds=ROUNDS)
def test_the_share_grows_to_one(rounds: list[tuple[list[int], int]]) -> None:
    effort, shares = Effort(), [0.0]
    for number, (trials, later) in enumerate(rounds):
        effort.round(sum(trials), later=later if number < len(rounds) - 1 else 0)
        for steps in trials:
            effort.trial(steps)
            shares.append(effort.share)
    assert shares == sorted(shares)
    assert max(shares) <= 1
    if rounds[-1][0]:
        assert shares[-1] == 1


def test_the_share_is_of_what_is_done_open_and_expected() -> None:
    effort = Effort()
    effort.round(30, later=60)
    effort.trial(10)
    assert effort.share == 10 / 90
    effort.trial(20)
    effort.round(10, later=0)  # fewer than expected
    assert effort.share == 30 / 40
    effort.round(200, later=0)  # more
    assert effort.share == 30 / 40
