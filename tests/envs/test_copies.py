"""Code of the user's gets copies: what it changes reaches no other member, no later
call and no file of the run.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollweave.envs.base import Episode, Observation, Options, Split, Step, new_task
from rollweave.envs.jsonl import Jsonl
from rollweave.envs.tasks import images_of
from rollweave.runtime.preflight.environments import examine_domain
from rollweave.schema.chat import Message
from rollweave.schema.config.loading import dumps
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Purpose, Task

from .worlds import config, draw, episode, source

OPTIONS: dict[str, Any] = {"level": 1, "tests": ["a"], "deep": {"list": [1, {"x": [2]}]}}
SEEN: list[str] = []
"""The options with which each hook was called, as JSON."""


def spoil(options: Any) -> None:
    SEEN.append(json.dumps(options, sort_keys=True))
    options["deep"]["list"][1]["x"].append("spoiled")
    options["deep"]["list"].clear()
    options.pop("tests").append("b")
    options.pop("level")


class Vandal:
    """An environment and, with `init`, `run` and `eval`, a handler, too."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        spoil(options)

    def reset(self, task: Task) -> Observation:
        return Observation.of("hello")

    def step(self, action: str) -> Step:
        return Step(done=True)

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        spoil(options)
        return new_task(seed=index)

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        spoil(options)
        return ["hello"]

    allowed_words = words

    @classmethod
    def transcript(cls, rng: Any, options: Options) -> Sequence[Message]:
        spoil(options)
        return [Message(role="user", content="hello"), Message(role="assistant", content="hello")]

    @classmethod
    def prompts(cls, options: Options) -> Iterator[tuple[str, Sequence[Message]]]:
        spoil(options)
        yield "a place", [Message(role="user", content="hello")]

    def prepare(self) -> None: ...  # not the hook, which belongs to the class

    @classmethod
    def drops_overlong(cls, options: Options) -> bool:
        spoil(options)
        return False

    @classmethod
    def score(cls, episode: Episode, options: Options) -> float:
        spoil(options)
        return 1.0


class VandalHandler(Vandal):
    @classmethod
    def images(cls, options: Options) -> Sequence[str]:
        spoil(options)
        return ()

    async def init(self, job: Any) -> None: ...

    async def run(self, agent: Any) -> None: ...

    async def eval(self) -> float:
        return 0.0


def vandals(kind: str = "Vandal", isolation: str = "inline") -> RunConfig:
    task = {"env": f"{__name__}:{kind}", "tag": "t", "options": json.loads(json.dumps(OPTIONS))}
    run = config({**task, "isolation": isolation})
    return RunConfig.model_validate({**run.model_dump(), "warmup": {"steps": 1}})


def checked(run: RunConfig, call: Callable[[], object]) -> None:
    """Call twice: each hook must see the options as they are configured."""
    before = dumps(run)
    SEEN.clear()
    for _ in range(2):
        call()
    assert set(SEEN) <= {json.dumps(OPTIONS, sort_keys=True)}
    assert dumps(run) == before


def test_no_hook_can_change_the_options(tmp_path: Path) -> None:
    run = vandals()
    of = source(tmp_path, run.tasks[0].model_dump())
    task = draw(of, "t")
    transcripts = of.transcripts(seed=0)

    async def lived() -> None:
        env = await of.provider("t").open(task)
        await env.reset(task)
        await env.close()
        await of.provider("t").score(episode(task, "a"))

    for call in (
        lambda: draw(of, "t", 1, Purpose.EVAL),
        of.words,
        lambda: of.allowed_words("t"),
        lambda: next(transcripts),
        lambda: asyncio.run(lived()),
        lambda: examine_domain(run, 0, deep=True),
    ):
        checked(run, call)
        assert SEEN
    handler = vandals("VandalHandler")
    checked(handler, lambda: images_of(handler.tasks[0].env, handler.tasks[0].options))
    checked(handler, lambda: examine_domain(handler, 0, deep=True))


async def test_not_even_in_a_process(tmp_path: Path) -> None:
    run = vandals(isolation="process")
    of = source(tmp_path, run.tasks[0].model_dump())
    task = draw(of, "t")
    try:
        for _ in range(2):
            env = await of.provider("t").open(task)
            assert (await env.reset(task)).messages[0].content == "hello"
            await env.close()
            assert (await of.provider("t").score(episode(task, "a"))).reward == 1.0
    finally:
        await of.close()


def spoiling_reward(record: dict[str, Any], answer: str) -> float:
    number = float(len(record["prompt"]) + len(record.pop("tests")))
    record["prompt"][0]["content"] = "spoiled"
    record["prompt"].append({"role": "user", "content": "more"})
    return number


def check_record(record: dict[str, Any]) -> None:
    if not record.pop("tests"):
        raise ValueError("tests must not be empty")
    record["prompt"].clear()


spoiling_reward.check_record = check_record  # type: ignore[attr-defined]


def test_a_reward_gets_its_own_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    record = {"prompt": [{"role": "user", "content": "hello"}], "tests": ["a", "b"]}
    path.write_text(json.dumps(record))
    options = {"path": str(path), "held_out": str(path), "reward": f"{__name__}:spoiling_reward"}
    of = source(tmp_path, {"env": "jsonl", "tag": "t", "options": options})
    task = draw(of, "t")
    for _ in range(2):
        assert [messages for _, messages in Jsonl.prompts(options)] == [
            (Message(role="user", content="hello"),)
        ]
        assert Jsonl(**options).reset(task).messages[0].content == "hello"
        score = asyncio.run(of.provider("t").score(episode(task, "a")))
        assert score.reward == 3.0
    path2 = tmp_path / "b.jsonl"
    path2.write_text(json.dumps(record) + "\n\n" + json.dumps({**record, "tests": []}))
    with pytest.raises(ValueError, match=r"b\.jsonl:3: tests must not be empty"):
        list(Jsonl.prompts({**options, "path": str(path2)}))
