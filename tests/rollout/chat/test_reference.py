"""Chat templates and tokenizers of many forms give the tokens that transformers gives,
and are refused where transformers refuses them.

A conversation is compared in two ways: rendered as a whole, and grown turn by turn with
the answers that the reference has in it.
"""

import datetime
import itertools
import json
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollweave.rollout.chat.codec import ChatCodec, ChatError
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from tests.support.chat_families import (
    SYSTEM,
    TEMPLATES,
    TOOLS,
    agent,
    call,
    checkpoint,
    result,
    user,
)
from tests.support.tokenizer_forms import FORMS

REFUSED = {
    "harmony": "a turn must end with '<|return|>' also where another follows",
    "numbered": "what follows a turn must not depend on earlier turns",
    "command_r_counted": "must not depend on earlier turns, and does before a message of role tool",
}
"""Templates that transformers renders and we do not, and why. docs/MODELS.md lists
them.
"""

ESCAPING = "sorted_json"
"""A template that escapes what is not ASCII: there transformers' guard fails."""

MOVES = ("mistral_v3",)
"""Templates that show the system message before the last question only."""


@pytest.fixture(autouse=True)
def _today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render dates at one moment, also around midnight."""

    class Moment(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Moment":
            return cls(2026, 3, 4, tzinfo=tz)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Moment)
    ours = types.SimpleNamespace(datetime=Moment)
    monkeypatch.setattr("rollweave.rollout.chat.template.datetime", ours)


class Case:
    def __init__(self, *messages: Message, tools: Sequence[str] = ()) -> None:
        self.messages, self.tools = messages, tuple(tools)


CASES = {
    "plain": Case(
        user("the user said"),
        agent("think, then answer."),
        user("more:\n\n- x"),
        agent("12"),
        user("ok?"),
    ),
    "system": Case(
        SYSTEM, user("hello"), agent("the answer"), user("x  y"), agent("é🙂 1"), user("z")
    ),
    "spaces": Case(user("  lead\tand\n"), agent("ok"), user("\n\n  \n"), agent("b"), user("ﬁ ½")),
    "tools": Case(
        SYSTEM,
        user("look"),
        agent("", call(1)),
        result(1, '{"result": 12}'),
        agent("So."),
        user("again"),
        agent("", call(2, "go", "{}"), call(3)),
        result(2, "none", "go"),
        result(3, "here"),
        agent("a"),
        user("thanks"),
        tools=TOOLS,
    ),
    "one call at a time": Case(
        user("look"), agent("", call(1)), result(1, "one"), agent("yes"), user("x"), tools=TOOLS
    ),
}


def plain(message: Message, *, as_text: bool) -> dict[str, Any]:
    """Return a message as transformers takes it; arguments of calls are objects unless
    the template takes them `as_text`.
    """
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": made.id,
                "type": "function",
                "function": {
                    "name": made.name,
                    "arguments": made.arguments if as_text else json.loads(made.arguments),
                },
            }
            for made in message.tool_calls
        ]
    optional = {"tool_call_id": message.tool_call_id, "name": message.name}
    return fields | {name: value for name, value in optional.items() if value}


class Reference:
    def __init__(self, directory: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._known: dict[Any, list[int] | None] = {}

    def tokens(self, case: Case, count: int, *, prompt: bool = True) -> list[int] | None:
        """Return the tokens of the first `count` messages, None if they are refused."""
        key = (case, count, prompt)
        if key not in self._known:
            self._known[key] = self._render(case, count, prompt=prompt)
        return self._known[key]

    def _render(
        self, case: Case, count: int, *, prompt: bool, markers: Sequence[str] = ()
    ) -> list[int] | None:
        tools = [json.loads(tool) for tool in case.tools] or None
        self._tokenizer.chat_control_tokens = list(markers)
        for as_text in (False, True):
            messages = [plain(message, as_text=as_text) for message in case.messages[:count]]
            try:
                return list(
                    self._tokenizer.apply_chat_template(
                        messages,
                        tools=tools,
                        add_generation_prompt=prompt,
                        return_dict=False,
                        sanitize_control_tokens=bool(markers),
                    )
                )
            except Exception:  # whatever a template raises is a refusal
                continue
        return None

    def guarded(self, case: Case, markers: Sequence[str]) -> list[int] | None:
        """Return the tokens where spellings of these markers in messages are text."""
        return self._render(case, len(case.messages), prompt=True, markers=markers)


def ours(codec: ChatCodec, case: Case, count: int) -> list[int] | None:
    try:
        return list(codec.start(case.messages[:count], case.tools))
    except ChatError:
        return None


def prompts(case: Case) -> Iterator[int]:
    """Yield the numbers of messages after which the agent is asked."""
    for count, message in enumerate(case.messages, 1):
        following = case.messages[count].role if count < len(case.messages) else ""
        if message.role in ("user", "tool") and following != "tool":
            yield count


def sampled_in(codec: ChatCodec, rest: Sequence[int]) -> list[int] | None:
    """Return the agent's turn at the beginning of what the reference has after a
    prompt, with its end; None if it has no end.
    """
    for count, token in enumerate(rest, 1):
        text = codec.decode(rest[:count])
        if token in codec.stop_token_ids or any(stop in text for stop in codec.stop):
            return list(rest[:count])
    return None


def check_growth(codec: ChatCodec, reference: Reference, case: Case, name: str) -> int:
    """Grow the conversation turn by turn. Return the number of turns of which the
    tokens are those of the whole conversation.
    """
    equal = 0
    for before, count in itertools.pairwise(prompts(case)):
        start, whole = (reference.tokens(case, number) for number in (before, count))
        closed = reference.tokens(case, count, prompt=False)
        if start is None or whole is None or closed is None:
            return equal
        first = next(
            place for place in range(before, count) if case.messages[place].role == "assistant"
        )
        new = case.messages[first + 1 : count]
        if whole[: len(start)] == start:
            sampled = sampled_in(codec, whole[len(start) :])
            if sampled is None:
                continue
            after = [
                start + sampled + list(codec.extend(sampled, new, prompt=prompt, tools=case.tools))
                for prompt in (True, False)
            ]
            assert after[0] == whole
            assert after[1] == closed or closed[: len(start)] != start
            equal += 1
        elif codec.stop_token_ids and name not in MOVES:
            end = codec.stop_token_ids[:1] if not codec.stop else ()
            added = list(codec.extend(end, new, tools=case.tools))
            # a message may be tokenized otherwise together with what precedes it
            assert whole[len(whole) - len(added) :] == added or codec.stop
    return equal


def check(directory: Path, template: str) -> int:
    """Compare one template with one tokenizer. Return the number of compared turns."""
    reference, turns = Reference(directory), 0
    try:
        codec = ChatCodec.from_directory(directory)
    except ConfigError as error:
        refusal = "" if reference.tokens(CASES["plain"], 1) is None else REFUSED[template]
        return check_refusal(error, refusal)
    for name, case in CASES.items():
        for count in prompts(case):
            assert ours(codec, case, count) == reference.tokens(case, count), (template, name)
        try:
            turns += check_growth(codec, reference, case, template)
        except ChatError as error:
            turns += check_refusal(error, REFUSED[template])
    if template != ESCAPING:
        check_spellings(codec, reference)
    return turns


def check_refusal(error: Exception, refusal: str) -> int:
    assert refusal in str(error)
    assert "\n" not in str(error)
    return 0


def check_spellings(codec: ChatCodec, reference: Reference) -> None:
    """Messages of others that spell markers have no marker."""
    markers = list(codec._guard.markers)
    spelled = "a " + "".join(markers[:6]) + f" b{markers[-1]}\n{markers[0]} c"
    case = Case(user(spelled), agent("ok"), user(markers[0]))
    if reference.guarded(Case(*case.messages[:1]), markers) is None:
        return  # refused for another reason, or also when it is text
    assert ours(codec, case, 3) == reference.guarded(case, markers)


def test_a_sample_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Every form with one template, and half of the templates."""
    assert len(TEMPLATES) >= 40
    assert len(FORMS) >= 12
    assert REFUSED.keys() <= TEMPLATES.keys()
    turns = 0
    for template, form in zip(list(TEMPLATES)[::2], FORMS, strict=True):
        (tmp_path / template).mkdir()
        turns += check(checkpoint(tmp_path / template, template, form), template)
    assert turns > 150


@pytest.mark.extended
@pytest.mark.parametrize("form", FORMS)
def test_every_template_gives_the_tokens_of_transformers(tmp_path: Path, form: str) -> None:
    turns = 0
    for template in TEMPLATES:
        (tmp_path / template).mkdir()
        turns += check(checkpoint(tmp_path / template, template, form), template)
    assert turns > 200
