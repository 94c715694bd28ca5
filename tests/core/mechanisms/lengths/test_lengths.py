"""Estimates of lengths and times follow from the turns and steps of environments so
far.
"""

import math

import pytest

from rollweave.core.mechanisms.lengths import estimates as lengths
from rollweave.core.mechanisms.lengths.estimates import KEPT_LENGTHS, MAX_ESTIMATE, MEAN_WEIGHT
from rollweave.core.mechanisms.lengths.index import DomainLengths, work_of
from rollweave.core.mechanisms.lengths.work import occupied
from rollweave.core.mechanisms.placement.assignment import Partition
from rollweave.core.policy.scheduling import UNKNOWN, level_of
from rollweave.core.state import Trajectory
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.training import LengthContext
from rollweave.schema.work import StopReason
from tests.support.hand import Hand, decoupled_config

FIRST, SECOND = TrajectoryId("g0.0"), TrajectoryId("g0.1")


class Listening(Hand):
    """Keeps what the predictor is asked and taught."""

    def __init__(self, *policies: str, members: int = 2) -> None:
        self.asked: list[c.Predict] = []
        self.taught: list[c.Harvest] = []
        super().__init__(
            decoupled_config(engines=1, rollout={"policies": list(policies), "group_size": members})
        )

    def answer(self, command: c.Command) -> list[e.Event]:
        if isinstance(command, c.Predict):
            self.asked.append(command)
        elif isinstance(command, c.Harvest):
            self.taught.append(command)
        return super().answer(command)

    def predicted(self, name: TrajectoryId, turn: int, remaining: float) -> None:
        self.feed(
            e.PredictionReady(trajectory_id=name, attempt=0, turn=turn, remaining_tokens=remaining)
        )

    def of(self, name: TrajectoryId) -> Trajectory:
        return self.core.state.trajectories[name]

    @property
    def stats(self) -> DomainLengths:
        return self.core.state.mechanisms["lengths"].domains["a"]

    def finishes(self, name: TrajectoryId) -> None:
        self.feed(
            e.TrajectoryEnded(
                trajectory_id=name, attempt=0, stop_reason=StopReason.FINISHED, turns=1, tokens=9
            )
        )


def walk() -> Listening:
    """The first trajectory has had a turn of 2 s and 3 tokens and an environment's step
    of 3 s, which added 10 tokens; its second turn is open.
    """
    hand = Listening("longest_first")
    hand.now = 2.0
    hand.done(FIRST, tokens=3)
    hand.now = 5.0
    hand.feed(hand.requests(FIRST, context=20))
    return hand


def asked_of(name: TrajectoryId, hand: Listening) -> list[LengthContext]:
    return [command.context for command in hand.asked if command.trajectory_id == name]


def test_the_predictor_is_asked_with_what_is_known_before_each_turn() -> None:
    hand = walk()
    context = {"domain": "a", "prompt_tokens": 7, "siblings": 0, "sibling_mean": 0.0}
    assert asked_of(FIRST, hand) == [
        LengthContext(
            **context,
            turn=0,
            output_tokens=0,
            last_output_tokens=0,
            observation_tokens=3,
            tool_s=0.0,
            sibling_longest=0,
        ),
        LengthContext(
            **context,
            turn=1,
            output_tokens=3,
            last_output_tokens=3,
            observation_tokens=3,
            tool_s=0.0,
            sibling_longest=0,
            answered=False,
        ),
        LengthContext(
            **context,
            turn=1,
            output_tokens=3,
            last_output_tokens=3,
            observation_tokens=10,
            tool_s=3.0,
            sibling_longest=0,
        ),
    ]
    assert [command.turn for command in hand.asked if command.trajectory_id == FIRST] == [0, 1, 1]
    assert hand.core.state.counters.scheduling.predictions == len(hand.asked)


def test_a_context_says_what_siblings_took() -> None:
    hand = walk()
    hand.done(FIRST, tokens=5)
    hand.finishes(FIRST)
    hand.done(SECOND, tokens=1)
    hand.feed(hand.requests(SECOND))
    newest = asked_of(SECOND, hand)[-1]
    assert (newest.siblings, newest.sibling_mean, newest.sibling_longest) == (1, 8.0, 8)


def test_the_longest_sibling_is_not_the_shortest() -> None:
    hand = Listening("longest_first", members=3)
    third = TrajectoryId("g0.2")
    for name, tokens in ((FIRST, 8), (third, 2)):
        hand.done(name, tokens=tokens)
        hand.finishes(name)
    hand.done(SECOND, tokens=1)
    hand.feed(hand.requests(SECOND))
    newest = asked_of(SECOND, hand)[-1]
    assert (newest.siblings, newest.sibling_mean, newest.sibling_longest) == (2, 5.0, 8)


def test_a_domain_learns_running_means() -> None:
    hand = walk()
    assert (hand.stats.prompt_tokens, hand.stats.tool_s) == (7.0, 3.0)
    assert (hand.stats.turn_s, hand.stats.turn_tokens) == (2.0, 3.0)
    assert work_of(hand.core._run, hand.of(FIRST)).kv_demand == 20 + 3
    hand.now = 11.0
    hand.done(FIRST, tokens=5)
    assert hand.stats.turn_tokens == pytest.approx(3 + MEAN_WEIGHT * (5 - 3))
    assert hand.stats.turn_s == pytest.approx(2 + MEAN_WEIGHT * (6 - 2))
    assert hand.of(FIRST).context_tokens == 25
    assert hand.core.state.counters.turns == 2


def test_a_finished_trajectory_is_one_of_the_domains_lengths() -> None:
    hand = walk()
    hand.done(FIRST, tokens=5)
    hand.finishes(FIRST)
    assert (hand.stats.lengths, hand.stats.length_sum) == ([8], 8)
    assert hand.stats.context_growth == (25 - 7) / 8
    assert [(one.trajectory_id, one.output_tokens) for one in hand.taught] == [(FIRST, 8)]


def test_an_attempt_that_was_cut_off_teaches_nothing() -> None:
    hand = walk()
    hand.done(FIRST, tokens=5)
    hand.feed(e.TrajectoryEnded(trajectory_id=FIRST, attempt=0, stop_reason=StopReason.ENV_ERROR))
    assert (hand.stats.lengths, hand.stats.context_growth) == ([], None)
    assert [(one.trajectory_id, one.output_tokens) for one in hand.taught] == [(FIRST, None)]
    assert hand.of(FIRST).output_tokens == 0, "its next attempt begins anew"


def test_only_the_newest_lengths_are_kept() -> None:
    hand = walk()
    hand.stats.lengths, hand.stats.length_sum = [2] * KEPT_LENGTHS, 2 * KEPT_LENGTHS
    hand.done(FIRST, tokens=5)
    hand.finishes(FIRST)
    assert hand.stats.lengths == [*[2] * (KEPT_LENGTHS - 1), 8]
    assert hand.stats.length_sum == sum(hand.stats.lengths)


def test_a_prediction_is_the_estimate_less_what_is_sampled_since() -> None:
    hand = walk()
    first = hand.of(FIRST)
    assert work_of(hand.core._run, first).length_bucket == UNKNOWN
    hand.predicted(FIRST, 1, 99.6)
    assert work_of(hand.core._run, first).estimate == 100
    assert work_of(hand.core._run, first).predicted_at_turn == 1
    assert work_of(hand.core._run, first).kv_token_steps == round(
        occupied(100, context=20, growth=1.0)
    )
    assert work_of(hand.core._run, first).length_bucket == level_of(103, None)
    assert hand.stats.predicted_length == 103.0
    hand.core.state.mechanisms["placement"].partitions[""] = Partition(planned=9)
    hand.done(FIRST, tokens=30)
    hand.predicted(FIRST, 2, 70.0)
    assert work_of(hand.core._run, first).estimate == 70
    hand.feed(hand.requests(FIRST, context=50))
    hand.predicted(FIRST, 2, 70.0)
    partition = hand.core.state.mechanisms["placement"].partitions[""]
    assert partition.predictions == 1, "a correction is no further prediction"
    hand.done(FIRST, tokens=90)
    assert work_of(hand.core._run, first).estimate == 1, "at least one token is left"


@pytest.mark.parametrize(
    ("turn", "remaining"), [(0, 50.0), (2, 50.0), (1, math.nan), (1, math.inf)]
)
def test_what_is_no_answer_to_the_question_changes_no_estimate(turn: int, remaining: float) -> None:
    hand = walk()
    before = work_of(hand.core._run, hand.of(FIRST)).estimate
    hand.predicted(FIRST, turn, remaining)
    assert work_of(hand.core._run, hand.of(FIRST)).estimate == before
    assert work_of(hand.core._run, hand.of(FIRST)).predicted_at_turn == -1
    assert hand.stats.predicted_length is None


def test_the_second_answer_corrects_the_first() -> None:
    """The first one is asked for beside the tool, and the second after its answer."""
    hand = walk()
    hand.predicted(FIRST, 1, 50.0)
    hand.predicted(FIRST, 1, 70.0)
    assert work_of(hand.core._run, hand.of(FIRST)).estimate == 70
    hand.predicted(SECOND, 0, 1e300)
    assert work_of(hand.core._run, hand.of(SECOND)).estimate == MAX_ESTIMATE


def test_answers_that_came_too_late_are_counted() -> None:
    hand = walk()
    late = hand.core.state.counters.scheduling.predictions_late
    assert late == 1, "of the first turn"
    hand.predicted(FIRST, 1, 50.0)
    hand.done(FIRST)
    assert hand.core.state.counters.scheduling.predictions_late == late
    hand.done(SECOND)
    assert hand.core.state.counters.scheduling.predictions_late == late + 1


@pytest.mark.parametrize(
    ("stats", "estimate"),
    [
        (DomainLengths(), 1),
        (DomainLengths(predicted_length=40.4), 40),
        (DomainLengths(lengths=[10, 40], length_sum=50, predicted_length=7.0), 25),
    ],
)
def test_before_a_prediction_the_estimate_is_that_of_the_domain(
    stats: DomainLengths, estimate: int
) -> None:
    hand = walk()
    hand.core.state.mechanisms["lengths"].domains["a"] = stats
    first = hand.of(FIRST)
    lengths.begin_attempt(hand.core._run, first)
    assert work_of(hand.core._run, first).estimate == estimate
    assert work_of(hand.core._run, first).last_output_tokens == 0
    assert work_of(hand.core._run, first).tool_s == 0.0
    assert work_of(hand.core._run, first).kv_resident is False
    assert work_of(hand.core._run, first).prediction_requested_for == -1
    assert work_of(hand.core._run, first).predicted_at_turn == -1


def test_a_turn_that_outruns_the_estimate_is_assumed_half_done() -> None:
    """A turn's tokens take two thirds of a second on average."""
    hand = walk()
    hand.predicted(FIRST, 1, 9.0)
    run = hand.core._run
    run.now = 5.0 + 6.0
    assert lengths.revise_outrun(run) == []
    run.now = 5.0 + 6.01
    (revised,) = lengths.revise_outrun(run)
    assert (revised.id, work_of(hand.core._run, revised).estimate) == (FIRST, round(2 * 6.01 * 1.5))
    assert lengths.revise_outrun(run) == []


def test_without_a_policy_by_length_no_prediction_is_requested() -> None:
    hand = Listening("fcfs")
    assert hand.asked == []
    hand.done(FIRST)
    hand.finishes(FIRST)
    assert hand.taught == []
    assert hand.core.state.engines[EngineId("e0")].active
