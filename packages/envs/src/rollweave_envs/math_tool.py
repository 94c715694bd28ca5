r"""Mathematics with an interpreter: the agent may run Python (numpy, scipy and sympy if
they are installed), then answers in `\boxed{}`.

This follows ProRL Agent's mathematics task (§4): IPython and a `think` tool. Invariant:
a problem belongs to exactly one split by its text.
"""

import random
from collections.abc import Sequence

from rollweave.envs.base import Options, Score, Split, new_task, split_of
from rollweave.envs.handlers.answers import judged, parse_numbers
from rollweave.envs.handlers.base import Agent
from rollweave.envs.handlers.tools import CallStyle
from rollweave.schema.base import mix
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task
from rollweave_envs.math_problems import FAMILIES, LEVELS
from rollweave_envs.questions import (
    TOOL_S,
    QuestionHandler,
    check_own_questions,
    own_question,
)

ABOUT = "Solve the problem. You may compute with the tool ipython, as often as you need."
TOOLS = ("ipython", "think")


class MathTool(QuestionHandler):
    """Problems of `families` (all by default) at `level` 1 to 3, or the user's own:
    records of the JSONL file `path`.

    A record has its `question`, a text, and its `answer`: words, or any mathematics
    that `answers.equivalent` can judge. `held_out` is a file of held-out records;
    without it two eighths of `path` are held out. The reward is 1 for a correct answer.
    One to a problem of the families must have the form that the problem requests: a
    number, or a tuple of numbers, and no expression that has yet to be computed.
    """

    def __init__(
        self,
        *,
        families: Sequence[str] = (),
        level: int = 1,
        path: str = "",
        held_out: str = "",
        question: str = "question",
        answer: str = "answer",
        calls: CallStyle = "native",
        tool_s: float = TOOL_S,
    ) -> None:
        names = {"question": question, "answer": answer}
        files = {"path": path, "held_out": held_out}
        _check({"families": families, "level": level, **files, **names})
        super().__init__(calls=calls, tool_s=tool_s)
        self._own = bool(path)

    async def run(self, agent: Agent) -> None:
        await self.solve(agent, about=ABOUT, names=TOOLS)

    async def eval(self) -> Score:
        given, expected = self._answer, self._question.answer
        if given is None:
            return Score(reward=0.0, success=False)
        numbers = None if self._own else parse_numbers(expected)
        if numbers is not None:
            right = parse_numbers(given) == numbers
            return Score(reward=float(right), success=right)
        return (await judged(given, expected)).score

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return a problem of the split.

        Raises ConfigError for invalid options, and for a file without records of the
        split.
        """
        _check(options)
        if options.get("path"):
            own = own_question(options, index=index, seed=seed, split=split)
            return new_task(question=own.question, answer=own.answer)
        rng, families = (
            random.Random(mix(seed, split, index)),
            list(options.get("families", ())) or list(FAMILIES),
        )
        while True:
            family = rng.choice(families)
            problem = FAMILIES[family](rng, options.get("level", 1))
            if split_of(problem.question) is split:
                return new_task(question=problem.question, answer=problem.answer)


def _check(options: Options) -> None:
    unknown = [family for family in options.get("families", ()) if family not in FAMILIES]
    if unknown:
        raise ConfigError(
            f"options.families must be some of {', '.join(FAMILIES)}, got {unknown[0]!r}"
        )
    level = options.get("level", 1)
    if not isinstance(level, int) or not 1 <= level <= LEVELS:
        raise ConfigError(f"options.level must be from 1 to {LEVELS}, got {level!r}")
    if options.get("held_out") and not options.get("path"):
        raise ConfigError(
            f"options.held_out must come with options.path, got {options['held_out']!r} alone"
        )
    check_own_questions(options)
