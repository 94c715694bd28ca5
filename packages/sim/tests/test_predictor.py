"""The simulated predictor gives the numbers of the real one, later by a constant and
deterministically.
"""

import random

import pytest

from rollweave.core.policy.predict import PRIOR_TOKENS, ProgressivePredictor
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import TrajectoryId
from rollweave.schema.errors import ConfigError
from rollweave.train.lengths import build_regressor
from rollweave_sim.clock import Clock
from rollweave_sim.effects import PREDICTION_S, SimPredictor
from tests.support.revealed_lengths import Example, trajectories


def ask(number: int, example: Example, turn: int) -> c.Predict:
    return c.Predict(
        trajectory_id=TrajectoryId(f"t{number}"),
        attempt=1,
        turn=turn,
        context=example.contexts[turn],
    )


def over(number: int, tokens: int | None) -> c.Harvest:
    return c.Harvest(trajectory_id=TrajectoryId(f"t{number}"), attempt=1, output_tokens=tokens)


class Stage:
    """A simulated predictor with its clock and its posted events by time."""

    def __init__(self, name: str = "ridge") -> None:
        self.clock = Clock()
        self.posted: list[tuple[float, e.Event]] = []
        self.predictor = SimPredictor(
            clock=self.clock,
            post=lambda event: self.posted.append((self.clock.now, event)),
            name=name,
        )

    def run(self) -> None:
        while self.clock.step():
            pass


def test_an_answer_arrives_one_latency_after_its_question() -> None:
    stage = Stage()
    (example,) = trajectories(1, seed=1)
    stage.clock.after(1.0, lambda: stage.predictor.predict(ask(0, example, 0)))
    stage.clock.after(1.1, lambda: stage.predictor.predict(ask(0, example, 1)))
    stage.run()
    ready = [
        e.PredictionReady(
            trajectory_id=TrajectoryId("t0"), attempt=1, turn=turn, remaining_tokens=PRIOR_TOKENS
        )
        for turn in (0, 1)
    ]
    assert stage.posted == [(1.0 + PREDICTION_S, ready[0]), (1.1 + PREDICTION_S, ready[1])]
    assert 0.099 < PREDICTION_S < 0.28


@pytest.mark.variants
@pytest.mark.parametrize("name", ["ridge", "boosted", "prompt", "history"])
def test_batched_answers_equal_single_ones(name: str) -> None:
    """Questions arrive at random times, with fits and ends between question and
    answer.
    """
    rng = random.Random(7)
    stage, slow = Stage(name), ProgressivePredictor(lambda: build_regressor(name))
    expected: list[float] = []
    fits: list[tuple[int, int]] = []
    for number, one in enumerate(trajectories(60, seed=1)):
        at = rng.uniform(0.0, 3.0) + number / 20
        for turn in range(len(one.contexts)):
            stage.clock.at(
                at, lambda n=number, o=one, t=turn: stage.predictor.predict(ask(n, o, t))
            )  # type: ignore[misc]
            stage.clock.at(
                at, lambda n=number, o=one, t=turn: expected.append(slow.predict(n, o.contexts[t]))
            )  # type: ignore[misc]
            at += rng.expovariate(20.0)
        tokens = one.tokens if rng.random() < 0.9 else None
        stage.clock.at(at, lambda n=number, k=tokens: stage.predictor.harvest(over(n, k)))  # type: ignore[misc]
        stage.clock.at(at, lambda n=number, k=tokens: slow.observe(n, k))  # type: ignore[misc]
    for step in range(1, 4):
        stage.clock.at(step * 1.5, lambda n=step: stage.predictor.fit(c.FitPredictor(step=n)))  # type: ignore[misc]
        stage.clock.at(step * 1.5, slow.fit)
        stage.clock.at(step * 1.5, lambda: fits.append((slow.fits, len(expected))))
    stage.run()
    answers = [
        event.remaining_tokens for _, event in stage.posted if isinstance(event, e.PredictionReady)
    ]
    assert len(answers) == len(expected) == 360
    # until then statistics answer, as of the time of the answer
    unfitted = max(count_requested for count, count_requested in fits if count <= 1)
    assert stage.predictor.predictor.fits == slow.fits >= 2
    assert answers[unfitted:] == expected[unfitted:]


def journal(name: str) -> list[tuple[float, e.Event]]:
    stage = Stage(name)
    for number, one in enumerate(trajectories(80, seed=2)):
        for turn in range(len(one.contexts)):
            stage.clock.at(
                number / 40 + turn / 7,
                lambda n=number, o=one, t=turn: stage.predictor.predict(ask(n, o, t)),
            )  # type: ignore[misc]
        stage.clock.at(
            number / 40 + 1.0, lambda n=number, o=one: stage.predictor.harvest(over(n, o.tokens))
        )  # type: ignore[misc]
    for step in range(1, 4):
        stage.clock.at(float(step), lambda n=step: stage.predictor.fit(c.FitPredictor(step=n)))  # type: ignore[misc]
    stage.run()
    return stage.posted


@pytest.mark.parametrize("name", ["ridge", "boosted"])
def test_the_same_commands_give_bit_equal_events(name: str) -> None:
    assert journal(name) == journal(name)


def test_a_lost_predictor_answers_nothing_and_restarts_empty() -> None:
    stage = Stage()
    example = trajectories(1, seed=1)[0]
    stage.predictor.predict(ask(0, example, 0))
    stage.predictor.harvest(over(0, example.tokens))
    stage.predictor.predict(ask(1, example, 0))
    stage.predictor.drop()
    stage.predictor.predict(ask(2, example, 0))
    stage.run()
    assert [(event.trajectory_id, event.remaining_tokens) for _, event in stage.posted] == [
        ("t2", PRIOR_TOKENS)
    ]  # type: ignore[union-attr]
    assert stage.predictor.predictor.pairs == 0


def test_a_simulation_has_no_text_for_a_language_model() -> None:
    with pytest.raises(ConfigError, match="must not have lm in a simulation"):
        Stage("lm")
