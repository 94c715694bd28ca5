"""Trajectories whose turns reveal their length, by a level that nothing reveals before
the first one.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from rollweave.core.policy.predict import ProgressivePredictor
from rollweave.schema.serving import STATE_WIDTH
from rollweave.schema.training import LengthContext
from rollweave_papers.measures import pearson, recall_of_longest

TURNS = 5


class Example(NamedTuple):
    """The contexts before each turn and after the last, and the total length."""

    contexts: Sequence[LengthContext]
    tokens: int


def trajectories(
    count: int,
    *,
    seed: int,
    domain: str = "a",
    scale: float = 1.0,
    plans: bool = False,
    opening: bool = False,
    prompts: bool = False,
    states: bool = False,
) -> list[Example]:
    """Generate trajectories whose turns are all about as long as their level.

    With `plans` the plan reveals the level, too, with `prompts` the prompt, and with
    `states` the state after each turn, in one of its values; with `opening` the first
    turn is only the plan, equally long for all.
    """
    rng = random.Random(f"{seed}/{domain}")
    examples = []
    for _ in range(count):
        level = rng.lognormvariate(4.0, 0.8) * scale
        turns = [max(1, round(level * rng.uniform(0.7, 1.3))) for _ in range(TURNS)]
        if opening:
            turns[0] = 20
        plan = (
            tuple(100 + min(9, int(level / scale / 25)) + 10 * rng.randrange(3) for _ in range(20))
            if plans
            else ()
        )
        prompt = rng.randrange(50, 500)
        level_tokens = (100 + min(9, int(level / scale / 25)),) * 20
        state = tuple(rng.gauss(0, 1) for _ in range(STATE_WIDTH - 1))
        state = (level / scale / 50, *state)
        contexts = [
            LengthContext(
                domain=domain,
                prompt_tokens=prompt,
                turn=turn,
                output_tokens=sum(turns[:turn]),
                last_output_tokens=turns[turn - 1] if turn else 0,
                observation_tokens=10 * turn,
                tool_s=0.1 * turn,
                siblings=0,
                sibling_mean=0.0,
                sibling_longest=0,
                plan=plan if turn else (),
                prompt=level_tokens if prompts else (),
                state=state if states and turn else (),
            )
            for turn in range(TURNS + 1)
        ]
        examples.append(Example(contexts, sum(turns)))
    return examples


def teach(predictor: ProgressivePredictor, examples: Sequence[Example]) -> None:
    """Show the examples completely, and fit."""
    for number, one in enumerate(examples):
        for context in one.contexts:
            predictor.remember(number, context)
        predictor.observe(number, one.tokens)
    predictor.fit()


def quality(
    predictor: ProgressivePredictor, examples: Sequence[Example], turn: int
) -> tuple[float, float]:
    """Return recall and correlation of total lengths, predicted before turn `turn`."""
    contexts = [one.contexts[turn] for one in examples]
    left = predictor.estimate([predictor.remember("judged", context) for context in contexts])
    guess = [context.output_tokens + tokens for context, tokens in zip(contexts, left, strict=True)]
    totals = [one.tokens for one in examples]
    return recall_of_longest(guess, totals), pearson(guess, totals)
