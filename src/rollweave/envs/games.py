"""Two games whose every text consists of known words: arithmetic with a calculator, and
Nim.

Calculator: call the tool, read its result, answer. An expression belongs to exactly one
split by its hash.

Nim is played against an opponent that sometimes plays perfectly: each move takes one to
three pieces, and taking the last piece wins. The opponent's moves depend on the task's
seed and the moves so far alone. The game is so small that held-out tasks have the piles
of training tasks; only the opponents' seeds differ.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rollweave.envs.base import Observation, Options, Split, Step, new_task, payload_of, split_of
from rollweave.schema.base import mix
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task

T = TypeVar("T", bound=Any)

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
CALCULATOR_TURNS = 4

_TOOL_CALL = re.compile(r"\s*<tool>\s*(\d{1,4})\s*([-+*])\s*(\d{1,4})\s*</tool>\s*", re.ASCII)
_ANSWER = re.compile(r"\s*<answer>\s*(-?\d{1,8})\s*</answer>\s*", re.ASCII)

MOST_TAKEN = 3
LARGEST_PILE = 40
NIM_TURNS = 12

_TAKE = re.compile(r"\s*<take-([1-3])>\s*")


def opened(kind: type[T], rng: random.Random, options: Options) -> tuple[T, list[Message]]:
    """Return a game that has begun a random training task, and its first messages."""
    task = kind.make_task(
        index=rng.getrandbits(32), seed=rng.getrandbits(32), split=Split.TRAIN, options=options
    )
    game = kind(**options)
    return game, list(game.reset(task).messages)


def random_play(
    kind: type[Any], rng: random.Random, options: Options, *, actions: Sequence[str], turns: int
) -> list[Message]:
    """Return a conversation of at most `turns` uniformly random actions."""
    game, messages = opened(kind, rng, options)
    for _ in range(turns):
        action = rng.choice(actions)
        step = game.step(action)
        messages += [Message(role="assistant", content=action), *step.messages]
        if step.done:
            break
    return messages


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
        call = _TOOL_CALL.fullmatch(action)
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
        env, messages = opened(cls, rng, options)
        left, operator, right = env._question
        solves, known = rng.random() < env._answers, [left, right]
        for turn in range(CALCULATOR_TURNS):
            if turn == 0 or (not solves and turn < CALCULATOR_TURNS - 1 and rng.random() < 0.2):
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


class Nim:
    """An observation is ` pile=7`; the agent answers `<take-3>`. The reward is 1 for
    taking the last piece, and -0.1 for a message that is no legal move.

    Piles are drawn from `smallest` to `largest`; the opponent plays perfectly with
    probability `skill`, otherwise at random.
    """

    blocking = False

    def __init__(
        self, *, smallest: int = 4, largest: int = 15, skill: float = 0.3, grammar: bool = False
    ) -> None:
        if not 1 <= smallest <= largest <= LARGEST_PILE:
            raise ConfigError(
                f"options.smallest must be 1 to largest, largest to {LARGEST_PILE}, "
                f"got {smallest} and {largest}"
            )
        if not 0 <= skill <= 1:
            raise ConfigError(f"options.skill must be from 0 to 1, got {skill}")
        self._smallest, self._largest, self._skill = smallest, largest, skill
        self._pile = 0
        self._opponent = random.Random(0)

    def reset(self, task: Task) -> Observation:
        self._pile = int(payload_of(task)["pile"])
        self._opponent = random.Random(task.seed)
        return Observation.of(self._view(), state_key=self._view())

    def step(self, action: str) -> Step:
        move = _TAKE.fullmatch(action)
        if move is None or int(move[1]) > self._pile:
            return Step.of(" invalid" + self._view(), reward=INVALID_REWARD, state_key=self._view())
        self._pile -= int(move[1])
        if not self._pile:
            return Step.of(" won", reward=1.0, done=True, success=True)
        self._pile -= self._reply()
        if not self._pile:
            return Step.of(" lost", done=True, success=False)
        return Step.of(self._view(), state_key=self._view())

    def _view(self) -> str:
        return f" pile={self._pile}"

    def _reply(self) -> int:
        winning = self._pile % (MOST_TAKEN + 1)
        if winning and self._opponent.random() < self._skill:
            return winning
        return self._opponent.randint(1, min(MOST_TAKEN, self._pile))

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return a random pile and opponent."""
        env, own = cls(**options), mix(seed, split, index)
        return new_task(seed=own, pile=random.Random(own).randint(env._smallest, env._largest))

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return [
            *(f" pile={pile}" for pile in range(1, cls(**options)._largest + 1)),
            *cls._moves(),
            *(" invalid", " won", " lost"),
        ]

    @classmethod
    def allowed_words(cls, options: Options) -> Sequence[str]:
        """Return the three moves with option `grammar = true`."""
        return cls._moves() if options.get("grammar", False) else []

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        """Return uniformly random moves. They show the format of a turn, but not which
        move is good.
        """
        return random_play(cls, rng, options, actions=cls._moves(), turns=NIM_TURNS)

    @classmethod
    def _moves(cls) -> list[str]:
        return [f"<take-{count}>" for count in range(1, MOST_TAKEN + 1)]
