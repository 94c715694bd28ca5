"""The recipes of `examples/chat`: their files are read, and a right conversation has
the reward 1, a wrong one 0.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollweave.envs import jsonl
from rollweave.envs.base import Score, payload_of
from rollweave.envs.handlers.base import Job, LimitError
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.envs.registry import resolve
from rollweave.envs.tasks import TaskSource
from rollweave.schema.config.loading import load
from rollweave.schema.work import Purpose, Task
from tests.envs.handlers.agents import Reply, Scripted, calls
from tests.envs.worlds import episode

CHAT = Path(__file__).parents[3] / "examples" / "chat"
ADAPTERS = ("lora.rank=16", "lora.alpha=32", "trainer.lr.peak=2e-4")

RIGHT, WRONG = Score(reward=1.0, success=True), Score(reward=0.0, success=False)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recipes run in their folder; modules and records from there are forgotten."""
    monkeypatch.chdir(CHAT)
    monkeypatch.syspath_prepend(CHAT)
    yield
    for path in CHAT.glob("*.py"):
        sys.modules.pop(path.stem, None)
    for cached in (resolve, *vars(jsonl).values()):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


def tasks(recipe: str, tmp_path: Path, *settings: str) -> TaskSource:
    return TaskSource(load(CHAT / f"{recipe}.toml", [*settings]), logs=tmp_path)


def score(of: TaskSource, task: Task, answer: str) -> Score:
    return asyncio.run(of.provider(task.tag).score(episode(task, answer)))


@pytest.mark.parametrize("recipe", ["sums", "tool", "reasoning"])
def test_a_recipe_trains_all_weights_or_adapters(recipe: str, tmp_path: Path) -> None:
    assert load(CHAT / f"{recipe}.toml", []).lora is None
    assert load(CHAT / f"{recipe}.toml", [*ADAPTERS]).lora is not None
    of = tasks(recipe, tmp_path)
    trained, held_out = (
        {(task.payload, task.seed) for task in (of.draw(recipe, n, purpose) for n in range(32))}
        for purpose in (Purpose.TRAIN, Purpose.EVAL)
    )
    assert len(trained) > 16
    assert not trained & held_out


def test_sums(tmp_path: Path) -> None:
    of = tasks("sums", tmp_path)
    task = of.draw("sums", 0, Purpose.EVAL)
    place = payload_of(task)
    record = json.loads((CHAT / place["file"]).read_text().splitlines()[place["row"]])
    assert score(of, task, f"It is {record['answer']}.") == RIGHT
    assert score(of, task, "I do not know.") == WRONG


def test_reasoning(tmp_path: Path) -> None:
    of = tasks("reasoning", tmp_path)
    task = of.draw("reasoning", 0, Purpose.EVAL)
    env = resolve("gym")(**load(CHAT / "reasoning.toml", []).tasks[0].options)
    *shots, asked = env.reset(task).messages
    assert [message.role for message in shots] == ["user", "assistant"]
    sentences, _, question = asked.content.partition("\nWho ")
    verb_and_object = question.partition("?")[0]
    (name,) = (
        sentence.split()[0] for sentence in sentences.split(".") if verb_and_object in sentence
    )
    assert score(of, task, f"<answer>{name}</answer>") == RIGHT
    assert score(of, task, "<answer>Nobody</answer>") == WRONG


async def priced(task: Task, style: str, *replies: Any) -> Score:
    """The reward of a conversation; a reply may be a function of the last message."""
    last = iter(replies)

    def policy(messages: Any) -> Reply:
        reply = next(last)
        return reply(messages[-1].content) if callable(reply) else reply

    handler = resolve("tool:Prices")(calls=style)
    await handler.init(Job(task=task, seed=0, sandboxes=Sandboxes("plain")))
    with contextlib.suppress(LimitError):
        await handler.run(Scripted(policy, turns=2))
    score = await handler.eval()
    assert isinstance(score, Score)
    return score


@pytest.mark.parametrize("style", ["text", "native"])
async def test_prices(tmp_path: Path, style: str) -> None:
    task = tasks("tool", tmp_path).draw("tool", 0, Purpose.EVAL)

    def call(item: str) -> Reply:
        return f"```price\n{item}\n```" if style == "text" else calls(("price", {"item": item}))

    right = call(payload_of(task)["item"])
    half = Score(reward=0.2, success=False)
    assert await priced(task, style, right, lambda price: f"It costs {price}.") == RIGHT
    assert await priced(task, style, right, "It costs 7.") == half
    assert await priced(task, style, right, right) == half
    assert await priced(task, style, call("moon"), lambda price: price) == WRONG
    assert await priced(task, style, "It costs 381.") == WRONG
