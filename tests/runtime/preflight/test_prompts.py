"""Prompts as a chat template shows them: what the agent is not shown is said once."""

from collections.abc import Iterator, Sequence

import pytest

from rollweave.envs.base import Observation, Options, Step
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.template import ChatTemplate
from rollweave.runtime.preflight.environments import Domain, examine_domain
from rollweave.runtime.preflight.prompts import examine_prompts
from rollweave.schema.chat import Message
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Limits, Task
from rollweave.train.scratch import CHAT_TEMPLATE, build_tokenizer

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
