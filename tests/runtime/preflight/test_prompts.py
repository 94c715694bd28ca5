"""Prompts as a chat template shows them: what the agent is not shown is said once."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from rollweave.envs.base import Observation, Options, Step
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.template import ChatTemplate
from rollweave.runtime.preflight.environments import Domain, examine_domain
from rollweave.runtime.preflight.prompts import check_tokens, describe_template, examine_prompts
from rollweave.schema.chat import Message
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Limits, Task
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
