"""Texts that an agent, its sandbox or a judge may write to make a parser slow: the time
that each takes grows with its length, and not with the square of it.

A parser that is quadratic takes minutes for them.
"""

import time
from collections.abc import Callable

import pytest

from rollweave.envs.handlers.answers import boxed_reward, equivalent, within_tolerance
from rollweave.envs.handlers.tools import fenced_blocks
from rollweave.rollout.chat.replies import Hermes
from rollweave.rollout.gateway.requests import _has_too_many_tokens
from rollweave.rollout.reward_sources import GRADE, VERDICT
from rollweave.sandbox.tools import plain
from rollweave.schema.text import decimal, failure_kind, shortened
from rollweave_envs.changes import patch
from rollweave_envs.reasoning import answer_in

SIZE = 128 << 10
MOST_S = 1.0

CALL = '<tool_call>{"name": "f"}</tool_call>'
OLD = "\n".join(("", "x", f"line {n}")[min(n % 6, 2)] for n in range(3000))
NEW = "\n".join("" if n % 110 == 0 else "x" if n % 113 == 1 else f"{n:x}" for n in range(30000))


def boxed(text: str) -> object:
    return boxed_reward({"answer": "5"}, text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((boxed, "a" * SIZE), (boxed, "<think>" * (SIZE // 7))),
        *((boxed, r"\boxed{" * (SIZE // 7)), (boxed, r"\boxed" + " " * SIZE)),
        *((boxed, r"\boxed{" + "{}" * SIZE), (boxed, r"\boxed{" + "{" * SIZE)),
        (lambda text: equivalent(text, "no solution"), "(" * 990),
        (lambda text: within_tolerance(text, "5", tolerance=0.1), "cm" * 500),
        (lambda text: equivalent(text, "no solution"), r"\text{" * 160),
        *((answer_in, "<answer>" * (SIZE // 8)), (answer_in, "<answer></answer>" * (SIZE // 17))),
        *((Hermes().parse, CALL * (1 << 15)), (Hermes().parse, CALL * (1 << 15) + "<tool_call>")),
        (Hermes().parse, "<tool_call>" * (SIZE // 11)),
        (Hermes().parse, "<tool_call>" + " " * SIZE),
        (Hermes().parse, "<tool_call>" + "[" * SIZE),
        *((fenced_blocks, "```python\n" * (SIZE // 10)), (GRADE.fullmatch, "score:" + "*" * SIZE)),
        (GRADE.fullmatch, "score: " + "1" * SIZE + "x"),
        (VERDICT.fullmatch, "verdict:" + "*" * SIZE),
        *((VERDICT.fullmatch, "verdict:" + "* " * SIZE), (decimal, "1" * SIZE + "x")),
        (decimal, "1." + "1" * SIZE + "e"),
        (lambda text: _has_too_many_tokens(text.encode(), 1), '\\"' * SIZE),
        *((plain, "\x1b]" * SIZE), (plain, "\x1b[" + "0" * SIZE + " " * SIZE)),
        *((failure_kind, "'a " * SIZE), (shortened, "\ud800" * SIZE)),
        (lambda text: patch({"a": OLD}, {"a": text}), NEW),
    ],
)
def test_a_text_of_any_length_is_parsed_in_linear_time(
    parse: Callable[[str], object], text: str
) -> None:
    before = time.process_time()
    parse(text)
    assert time.process_time() - before < MOST_S
