"""Prompts as a chat template shows them: what the agent is not shown is said once."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from rollweave.envs.base import Observation, Options, Step
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.template import ChatTemplate
from rollweave.runtime.preflight import environments
from rollweave.runtime.preflight.environments import Domain, examine_domain
from rollweave.runtime.preflight.prompts import check_tokens, describe_template, examine_prompts
from rollweave.schema.base import TaskId
from rollweave.schema.chat import Message
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Limits, Purpose, Task
from rollweave.train.scratch import CHAT_TEMPLATE, build_tokenizer
from rollweave.weights.checkpoint import read_shape
from tests.support.chat_families import checkpoint

QUESTION = Message(role="user", content="hi")
ANSWER = Message(role="assistant", content="a", thoughts="t")
THOUGHTFUL = CHAT_TEMPLATE.replace(
    "{{", "{% if message.reasoning_content %}<{{ message.reasoning_content }}>{% endif %}{{", 1
)


def warnings(template: str, *prompts: Sequence[Message]) -> list[str]:
    domain = Domain(
        name="tasks.0",
        words=(),
        images=(),
        allowed=(),
        limits=Limits(max_tokens=512),
        prompts=tuple((f"a.jsonl:{at}", tuple(prompt)) for at, prompt in enumerate(prompts, 1)),
    )
    codec = ChatCodec(build_tokenizer(()), ChatTemplate(template, special={}, name="test"))
    return [check.detail for check in examine_prompts(codec, [domain])]


def test_thoughts_that_the_template_does_not_show() -> None:
    prompts = [QUESTION], [QUESTION, ANSWER, QUESTION]
    assert warnings(CHAT_TEMPLATE, *prompts) == [
        "1 have thoughts (reasoning_content), and the chat template shows none of those of "
        "a.jsonl:2"
    ]
    assert warnings(THOUGHTFUL, *prompts) == []


def test_prompts_that_end_with_an_answer() -> None:
    bare = Message(role="assistant", content="a")
    assert warnings(CHAT_TEMPLATE, [QUESTION], [QUESTION, bare]) == [
        "1 of 2 end with an assistant's message, which the agent is shown: a.jsonl:2"
    ]


class Halves:
    """Lists a prompt with half a surrogate pair, which no encoder accepts."""

    def reset(self, task: Task) -> Observation:
        return Observation.of("hi")

    def step(self, action: str) -> Step:
        return Step(done=True)

    @classmethod
    def prompts(cls, options: Options) -> Iterator[tuple[str, Sequence[Message]]]:
        yield "here", [Message(role="user", content="bad \ud83d")]


class Wrong(Halves):
    @classmethod
    def prompts(cls, options: Options) -> Iterator[tuple[str, Sequence[Message]]]:
        yield "here", ["hi"]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("kind", "problem"), [("Halves", ""), ("Wrong", "prompts must return places and messages")]
)
def test_an_environment_that_lists_its_prompts(kind: str, problem: str) -> None:
    config = RunConfig.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": "none"},
            "tasks": [{"env": f"{__name__}:{kind}"}],
        }
    )
    domain, checks = examine_domain(config, 0, deep=False)
    if not problem:
        assert domain is not None
        assert domain.prompts == (("here", (Message(role="user", content="bad \ufffd"),)),)
    else:
        assert problem in checks[-1].detail


SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("rows", "token", "status", "text"),
    [
        (0, None, "", ""),
        (1, AddedToken("[PAD]", special=True), "warn", "such as '[PAD]'"),
        (1, AddedToken("<b>"), "fail", "got 1 beyond them, such as '<b>'"),
        (1, None, "fail", "such as '<|im_start|>'"),
        (9, None, "fail", "got 9 beyond them"),
    ],
)
def test_tokens_beyond_the_embedding(
    tmp_path: Path, rows: int, token: AddedToken | None, status: str, text: str
) -> None:
    """`rows` tokens have no row."""
    checkpoint(tmp_path, "chatml", "byte_level")
    path = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    if token is not None:
        tokenizer.add_tokens([token])
        tokenizer.save(path)
    size = tokenizer.get_vocab_size()
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "vocab_size": size}))
    shape = dataclasses.replace(read_shape(tmp_path), vocab=size - rows)
    checks = list(check_tokens(ChatCodec.from_directory(tmp_path), shape))
    assert [check.status for check in checks] == [status] * bool(status)
    assert all(text in check.detail for check in checks)


def test_ends_beyond_the_vocabulary_are_none(tmp_path: Path) -> None:
    checkpoint(tmp_path, "chatml", "with_begin_and_end")  # names 1, 2 and 999999
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "vocab_size": 1000}))
    codec = ChatCodec.from_directory(tmp_path)
    assert {1, 2} < set(codec.stop_token_ids)
    assert max(codec.stop_token_ids) < 1000


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("qwen3", "a turn ends at token .*; thoughts stay as they were"),
        ("user_assistant", r"at token 1 or text '\\n'$"),
    ],
)
def test_the_dry_run_says_what_the_template_does(tmp_path: Path, template: str, words: str) -> None:
    codec = ChatCodec.from_directory(checkpoint(tmp_path, template, "byte_level"))
    assert re.search(words, describe_template(codec).detail)


@pytest.mark.parametrize(
    ("drawn", "count", "number"),
    [
        ("abc", 3, None),
        ("abcab", 5, 3),
        ("aaaa", 4, 1),
        ("abcab", 3, None),
        ("abac", 4, None),  # they come in another order, and are not counted
        ("ab" * 1000, 2000, 2),
        ("", 0, None),
    ],
)
def test_the_tasks_of_a_split_are_counted_where_they_repeat(
    drawn: str, count: int, number: int | None
) -> None:
    asked = list[int]()

    def draw(name: str, index: int, purpose: Purpose) -> Task:
        asked.append(index)
        assert (name, purpose) == ("lake", Purpose.EVAL)
        return Task(id=TaskId("t"), env="lake", seed=7, payload=drawn[index - 50])

    source: Any = SimpleNamespace(draw=draw)
    assert environments._exhausted(source, "lake", 50, count) == number
    assert asked == list(range(50, 50 + len(asked)))
    assert len(asked) <= min(count, environments.COUNTED)


def test_slow_tasks_are_not_counted_but_the_first_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, asked = 0.0, list[int]()

    def draw(name: str, index: int, purpose: Purpose) -> Task:
        nonlocal now
        asked.append(index)
        now += environments.COUNTING_S
        return Task(id=TaskId("t"), env="lake", seed=0)

    monkeypatch.setattr(environments, "time", SimpleNamespace(monotonic=lambda: now))
    source: Any = SimpleNamespace(draw=draw)
    assert environments._exhausted(source, "lake", 0, 9) is None
    assert asked == [0, 1]
