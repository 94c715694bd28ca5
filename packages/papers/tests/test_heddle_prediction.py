"""Heddle's prediction: contexts are those of the core's requests, and later predictions
are better.
"""

import pytest

from rollweave_papers.heddle_prediction import (
    MEMBERS,
    MIN_TURNS,
    QUICK,
    TASKS,
    TOKEN_S,
    Batches,
    fig13,
    quality,
    trajectories_of,
)
from rollweave_sim.workload import Plan, workload
from tests.support.variants import mostly_slow

SMALL = Batches(count=2, groups=20)


def plans_of(task: str, index: int, *, epoch: int) -> list[Plan]:
    return [
        workload(task).plan(index=index, member=member, attempt=epoch, seed=0)
        for member in range(MEMBERS)
    ]


def test_contexts_are_those_of_the_plans() -> None:
    """Again, turn by turn."""
    plans = plans_of("coding", 3, epoch=1)
    totals = [sum(turn.output_tokens for turn in plan.turns) for plan in plans]
    ends = [sum(turn.output_tokens * TOKEN_S + turn.env_s for turn in plan.turns) for plan in plans]
    for member, (plan, one) in enumerate(zip(plans, trajectories_of("coding", 3, 1), strict=True)):
        assert one.tokens == totals[member] == one.contexts[-1].output_tokens
        assert [context.turn for context in one.contexts] == list(range(len(plan.turns) + 1))
        for number, context in enumerate(one.contexts):
            done, before = plan.turns[:number], plan.turns[: max(0, number - 1)]
            assert context.output_tokens == sum(turn.output_tokens for turn in done)
            assert context.observation_tokens == sum(turn.observation_tokens for turn in before)
            at = sum(turn.output_tokens * TOKEN_S for turn in done) + sum(
                turn.env_s for turn in before
            )
            ended = [
                totals[other] for other in range(MEMBERS) if other != member and ends[other] <= at
            ]
            assert context.siblings == len(ended)
            assert context.sibling_longest == max(ended, default=0)
            assert context.sibling_mean == pytest.approx(sum(ended) / len(ended) if ended else 0.0)


def test_history_remembers_the_members_of_an_earlier_epoch() -> None:
    earlier = [
        sum(turn.output_tokens for turn in plan.turns) for plan in plans_of("math", 5, epoch=0)
    ]
    for one in trajectories_of("math", 5, 1):
        assert (one.recalled.turn, one.recalled.output_tokens) == (0, 0)
        assert one.recalled.sibling_mean == pytest.approx(sum(earlier) / MEMBERS)
        assert one.tokens not in (0, one.recalled.sibling_mean)


@pytest.mark.extended
@pytest.mark.parametrize("task", mostly_slow(TASKS, {"coding"}))
def test_later_predictions_are_better(task: str) -> None:
    measured = quality(task, SMALL)
    assert list(measured) == [
        "history",
        "prompt",
        *(f"after {turns}" for turns in range(MIN_TURNS)),
    ]
    assert measured["after 0"].pearson < measured["after 1"].pearson < measured["after 2"].pearson
    assert measured == quality(task, SMALL)


@pytest.mark.slow
def test_rows_are_our_own_and_the_text_is_missing() -> None:
    *rows, text = fig13(True)
    assert len(rows) == len(TASKS) * 2 * (2 + MIN_TURNS)
    assert len({row.row for row in rows}) == len(rows)
    assert all(row.own and row.published is None and row.ours is not None for row in rows)
    assert all(-1.0 <= (row.ours or 0.0) <= 1.0 for row in rows)
    assert all(f"{QUICK.groups * MEMBERS}" in row.note for row in rows)
    assert (text.ours, text.published) == (None, None)
