"""Environments of verifiers, as packages of it have them: each function is the
`load_environment` of a module. Import it only where verifiers is installed.
"""

import asyncio
import warnings
from typing import Any

import verifiers as vf
from datasets import Dataset

WORDS = ("red", "green", "blue", "black", "white", "brown", "pink", "grey")


def words(count: int = 8) -> Any:
    rows = [
        {"question": f"Say {word}.", "answer": word, "info": {"place": place}}
        for place, word in enumerate(WORDS[:count])
    ]
    return Dataset.from_list(rows)


async def exact(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def brief(completion: Any) -> float:
    return float(len(completion[-1]["content"]) < 10)


def echo(*, held_out: bool = False, system: str = "Answer.") -> Any:
    """One turn, with two reward functions."""
    rubric = vf.Rubric(funcs=[exact, brief], weights=[1.0, 0.5])
    return vf.SingleTurnEnv(
        dataset=words(),
        eval_dataset=words(2) if held_out else None,
        system_prompt=system,
        rubric=rubric,
    )


class Counting(vf.MultiTurnEnv):  # type: ignore[misc]
    """The agent counts to three."""

    cleaned = 0

    @vf.stop  # type: ignore[untyped-decorator]
    async def counted(self, state: Any) -> bool:
        return len(state["trajectory"]) == 3

    @vf.cleanup  # type: ignore[untyped-decorator]
    async def clean(self, state: Any) -> None:
        del state
        await asyncio.sleep(0)
        Counting.cleaned += 1

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": f"{len(state['trajectory'])}, and then?"}]


def counting(*, broken: bool = False) -> Any:
    async def all_numbers(state: Any) -> float:
        if broken:
            raise ZeroDivisionError("no numbers")
        said = [step["completion"][0].content for step in state["trajectory"]]
        return float(said == ["1", "2", "3"]) / 2 + 0.25

    def never_counted(state: Any) -> float:
        raise ValueError("a metric may fail")

    rubric = vf.Rubric(funcs=[all_numbers, never_counted], weights=[1.0, 0.0])
    return Counting(dataset=words(), rubric=rubric)


def tools() -> Any:
    """The agent adds with a tool."""

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    def added(completion: Any) -> float:
        return float(completion[-1]["content"] == "5")

    return vf.ToolEnv(tools=[add], dataset=words(), rubric=vf.Rubric(funcs=[added]), max_turns=4)


def both() -> Any:
    return vf.EnvGroup(envs=[echo(), counting(broken=True)], env_names=["echo", "counting"])


def ranked() -> Any:
    def places(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    return vf.SingleTurnEnv(dataset=words(), rubric=vf.Rubric(funcs=[places]))


def completion() -> Any:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return vf.SingleTurnEnv(
            dataset=words(), rubric=vf.Rubric(funcs=[exact]), message_type="completion"
        )


def evaluated() -> Any:
    """No data set to train on."""
    return vf.SingleTurnEnv(eval_dataset=words(), rubric=vf.Rubric(funcs=[exact]))


def failing() -> Any:
    raise LookupError("no key")
