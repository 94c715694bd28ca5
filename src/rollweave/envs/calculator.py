"""Arithmetic with a calculator: call the tool, read its result, answer.

Invariants: an expression belongs to exactly one split by its hash; every text of the
environment consists of `words()`.
"""

import random
import re
from collections.abc import Callable, Sequence

from rollweave.envs.base import Observation, Options, Split, Step, new_task, payload_of, split_of
from rollweave.schema.base import mix
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
LARGEST = 20
"""Default of `largest`. In one comparison, a tiny model did worse on held-out questions
with 9.
"""

MOST = 50
"""Maximum of `largest`: every number that can occur is a word of the vocabulary."""

CALL_REWARD = 0.2
INVALID_REWARD = -0.1
TRANSCRIPT_TURNS = 4

_CALL = re.compile(r"\s*<tool>\s*(\d{1,4})\s*([-+*])\s*(\d{1,4})\s*</tool>\s*", re.ASCII)
_ANSWER = re.compile(r"\s*<answer>\s*(-?\d{1,8})\s*</answer>\s*", re.ASCII)


class Calculator:
    """The question is ` 3 + 4 =?`; the agent calls `<tool> 3 + 4</tool>`, reads `
    result 7`, and ends with `<answer> 7</answer>`.

    The reward is 1 for the right answer, 0.2 for the first call of exactly the
    question, and -0.1 for a message that is neither. `answers` is the share of the
    warm-up's transcripts that are solved correctly.
    """

    blocking = False

    def __init__(
        self, *, largest: int = LARGEST, operators: str = "+-", answers: float = 0.5
    ) -> None:
        if not 1 <= largest <= MOST:
            raise ConfigError(f"options.largest must be from 1 to {MOST}, got {largest}")
        if not operators or set(operators) - set(OPERATIONS):
            raise ConfigError(
                f"options.operators must be some of {''.join(OPERATIONS)}, got {operators!r}"
            )
        if not 0 <= answers <= 1:
            raise ConfigError(f"options.answers must be from 0 to 1, got {answers}")
        self._largest, self._operators, self._answers = largest, operators, answers
        self._question: tuple[int, str, int] = (0, "+", 0)
        self._called = False

    def reset(self, task: Task) -> Observation:
        left, operator, right = payload_of(task)["question"]
        self._question = (int(left), str(operator), int(right))
        self._called = False
        text = f" {left} {operator} {right} =?"
        return Observation.of(text, state_key=text)

    def step(self, action: str) -> Step:
        answer = _ANSWER.fullmatch(action)
        if answer is not None:
            right = int(answer[1]) == _result(self._question)
            return Step(reward=float(right), done=True, success=right)
        call = _CALL.fullmatch(action)
        request = (int(call[1]), call[2], int(call[3])) if call is not None else None
        if (
            request is None
            or max(request[0], request[2]) > self._largest
            or request[1] not in self._operators
        ):
            return Step.of(" error", role="tool", reward=INVALID_REWARD, state_key=" error")
        exact = request == self._question and not self._called
        self._called = self._called or exact
        text = f" result {_result(request)}"
        return Step.of(text, role="tool", reward=CALL_REWARD if exact else 0.0, state_key=text)

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return a random expression of the split."""
        env, rng = cls(**options), random.Random(mix(seed, split, index))
        while True:
            question = env._draw(rng)
            if split_of(" ".join(map(str, question))) is split:
                return new_task(question=question)

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        env = cls(**options)
        operands = range(env._largest + 1)
        numbers = {
            _result((a, operator, b))
            for a in operands
            for operator in env._operators
            for b in operands
        }
        return [
            *("<tool>", "</tool>", "<answer>", "</answer>", " =?", " result", " error"),
            *(f" {operator}" for operator in env._operators),
            *(f" {number}" for number in sorted(numbers.union(operands))),
        ]

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        """Return a correct solution with probability `answers` (half by default), else
        random calls and answers. The correct solutions reveal the policy.

        Random calls and answers use the numbers of the question and of the results in
        any order.
        """
        task = cls.make_task(
            index=rng.getrandbits(32), seed=rng.getrandbits(32), split=Split.TRAIN, options=options
        )
        env = cls(**options)
        messages = list(env.reset(task).messages)
        left, operator, right = env._question
        solves, known = rng.random() < env._answers, [left, right]
        for turn in range(TRANSCRIPT_TURNS):
            if turn == 0 or (not solves and turn < TRANSCRIPT_TURNS - 1 and rng.random() < 0.2):
                if not solves:
                    left, operator, right = (
                        rng.choice(env._question[::2]),
                        rng.choice(env._operators),
                        rng.choice(env._question[::2]),
                    )
                action = f"<tool> {left} {operator} {right}</tool>"
                known.append(_result((left, operator, right)))
            else:
                action = f"<answer> {known[-1] if solves else rng.choice(known)}</answer>"
            step = env.step(action)
            messages += [Message(role="assistant", content=action), *step.messages]
            if step.done:
                break
        return messages

    def _draw(self, rng: random.Random) -> tuple[int, str, int]:
        return (
            rng.randint(0, self._largest),
            rng.choice(self._operators),
            rng.randint(0, self._largest),
        )


def _result(question: tuple[int, str, int]) -> int:
    left, operator, right = question
    return OPERATIONS[operator](left, right)
