"""Turns that must call a tool, and strict tools: the grammars, and a tiny engine of
random weights whose every answer is a valid call in every API.
"""

import json
from pathlib import Path
from typing import Any, Literal

import jsonschema
import numpy as np
import pydantic
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer

from rollweave.engine.constraints import Grammars, Matcher
from rollweave.rollout.chat.replies import Hermes
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.preparing import call_constraint
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.schema.serving import Constraint
from tests.support.chats import bpe
from tests.support.real_gateway import Turns, checkpoint, engine, logprob_error, served
from tests.support.scripted_gateway import Script, ask, gateway

PLAIN = TextCodec(bpe())
END = bpe().token_to_id("<|im_end|>")
MOVE: dict[str, Any] = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/Side"}, "hard": {"type": "boolean"}},
    "required": ["to"],
    "$defs": {"Side": {"enum": ["left", "right"]}},
}
WAIT: dict[str, Any] = {"type": "object", "properties": {}}
STRICT = {"move": True, "wait": False}
SCHEMAS = {"move": MOVE, "wait": WAIT}


def tools(**strict: bool) -> list[dict[str, Any]]:
    return [
        {"name": name, "parameters": schema, "strict": strict.get(name, False)}
        for name, schema in SCHEMAS.items()
    ]


def chat(*, call: str | None, constraint: Constraint | None = None, **strict: bool) -> ChatRequest:
    shown = [json.dumps({"type": "function", "function": tool}) for tool in tools(**strict)]
    return ChatRequest(
        model="m", tools=tuple(shown), call=call, constraint=constraint, reads_calls=True
    )


def allowed(matcher: Matcher) -> Any:
    """Return which tokens of the vocabulary can follow."""
    return np.unpackbits(np.frombuffer(matcher.allowed(), dtype=np.uint8), bitorder="little")


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


LEFT, WAITED = called("move", '{"to": "left"}'), called("wait", "{}")
NUMBER = Constraint(kind="regex", text="[0-9]+")


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (
            chat(call=""),
            [LEFT, WAITED, LEFT + WAITED, f"{LEFT}\n{LEFT}"],
            ["", "I", called("fly", "{}"), called("wait", '{"a": 1}'), LEFT + "."],
        ),
        (chat(call="wait"), [WAITED], [LEFT, WAITED + LEFT]),
        (
            chat(call=None, move=True),
            ["", "I wait. <tool", f"I move. {LEFT}\nDone.", called("wait", '{"a": [1, {}]}')],
            [called("move", '{"to": "up"}'), called("move", "{}"), called("fly", "{}")],
        ),
        (
            chat(call=None, constraint=NUMBER),
            ["12", called("move", '{"any": 1}'), LEFT + LEFT],
            ["", "I", f"12{LEFT}", called("move", "12")],
        ),
    ],
)
@pytest.mark.parametrize("marks", [(), ("<tool_call>", "</tool_call>")], ids=["text", "tokens"])
def test_the_grammar_of_calls(
    tmp_path: Path, asked: ChatRequest, good: list[str], bad: list[str], marks: tuple[str, ...]
) -> None:
    """Also if the marks of a call are added tokens, which no letters match."""
    tokenizer = Tokenizer.from_str(bpe().to_str())
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path, vocab=tokenizer.get_vocab_size())
    constraint = call_constraint(asked, Hermes(), TextCodec(tokenizer))
    assert constraint is not None

    def may_end(text: str) -> bool:
        matcher = grammars.matcher(constraint, ends=[END])
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            if not allowed(matcher)[token]:
                return False
            matcher.feed(token)
        return bool(allowed(matcher)[END])

    assert [text for text in good if not may_end(text)] == []
    assert [text for text in bad if may_end(text)] == []


async def test_a_turn_without_strict_tools_is_free_and_bad_parameters_are_refused() -> None:
    """By the field of the tool, also if others are sound."""
    assert call_constraint(chat(call=None), Hermes(), PLAIN) is None
    wrong = {"name": "f", "parameters": {"type": "object", "not": {}}, "strict": True}
    declared = [{"type": "function", "function": tool} for tool in (*tools(), wrong)]
    field = "tools.2.function.parameters"
    async with gateway(Script()) as (_, client):
        for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
            status, answer = await client.post(ask(tools=declared, tool_choice=choice))
            assert (status, answer["error"]["param"]) == (400, field)
            assert answer["error"]["message"].startswith(f"{field} must be a JSON schema that can")
        wait = {"type": "function", "function": {"name": "wait"}}
        assert (await client.post(ask(tools=declared, tool_choice=wait)))[0] == 200


def valid(name: str, arguments: str | dict[str, Any]) -> bool:
    """Return whether these are arguments of the tool."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    jsonschema.validate(value, SCHEMAS[name])
    return set(value) <= set(SCHEMAS[name]["properties"])


@pytest.mark.extended
async def test_every_answer_is_a_call_in_every_api(tmp_path: Path) -> None:
    """All of it is sampled, with the log-probs of the model's full distribution."""
    directory = checkpoint(tmp_path)
    message: Any = [{"role": "user", "content": "go"}]
    functions: list[Any] = [{"type": "function", **tool} for tool in tools(**STRICT)]
    async with (
        engine(directory) as tiny,
        served(Turns(tiny), directory, "s") as (server, url, access),
        AsyncOpenAI(base_url=url + access["s"].path, api_key=access["s"].token) as openai,
    ):
        for choice in ("required", {"type": "function", "function": {"name": "move"}}):
            chatted = await openai.chat.completions.create(
                model="m",
                messages=message,
                tools=[{"type": "function", "function": tool} for tool in tools()],
                tool_choice=choice,  # type: ignore[arg-type]
                parallel_tool_calls=False,
                max_tokens=200,
            )
            (call,) = chatted.choices[0].message.tool_calls or ()
            assert valid(call.function.name, call.function.arguments)  # type: ignore[union-attr]
            response = await openai.responses.create(
                model="m",
                input="go",
                tools=functions,
                tool_choice="required"
                if choice == "required"
                else {"type": "function", "name": "move"},
                parallel_tool_calls=False,
                max_output_tokens=200,
            )
            (item,) = response.output
            assert item.type == "function_call"
            assert valid(item.name, item.arguments)
        base = url + access["s"].path.removesuffix("/v1")
        async with AsyncAnthropic(base_url=base, auth_token=access["s"].token) as api:
            for wanted in ({"type": "any"}, {"type": "tool", "name": "move"}):
                said = await api.messages.create(
                    model="m",
                    max_tokens=200,
                    messages=message,
                    tools=[
                        {"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()
                    ],
                    tool_choice={**wanted, "disable_parallel_tool_use": True},
                )
                (use,) = said.content
                assert use.type == "tool_use"
                assert valid(use.name, use.input)
        sequences = server.close("s").sequences
    for sequence in sequences:
        assert logprob_error(directory, sequence) < 1e-4
        (turn,) = sequence.turns
        opening = bpe().decode(list(sequence.tokens[turn.start :]))
        assert opening.startswith("<tool_call>\n")


class Move(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    move: Literal["left", "right"]
    hard: bool


@pytest.mark.extended
async def test_every_answer_has_its_form_in_every_api(tmp_path: Path) -> None:
    """The recorded log-probs are those of the model, not of what the form left."""
    directory, go = checkpoint(tmp_path), {"role": "user", "content": "go"}
    schema = {"type": "json_schema", "schema": Move.model_json_schema()}
    chatted: list[Any] = [go]
    items: list[Any] = [go]
    said: list[Any] = [go]
    async with (
        engine(directory) as tiny,
        served(Turns(tiny), directory, "s") as (server, url, access),
        AsyncOpenAI(base_url=url + access["s"].path, api_key=access["s"].token) as openai,
        AsyncAnthropic(
            base_url=url + access["s"].path.removesuffix("/v1"), auth_token=access["s"].token
        ) as anthropic,
    ):
        for streamed in (False, True):
            wanted: Any = {"model": "m", "messages": chatted, "response_format": Move}
            wanted |= {"logprobs": True, "max_tokens": 400}
            if streamed:
                async with openai.chat.completions.stream(**wanted) as stream:
                    answer: Any = await stream.get_final_completion()
            else:
                answer = await openai.chat.completions.parse(**wanted)
            assert answer.choices[0].message.parsed.move in ("left", "right")
            assert answer.choices[0].logprobs is not None
            content = answer.choices[0].message.content
            chatted += [{"role": "assistant", "content": content}, {**go, "content": "again"}]
            response = await openai.responses.parse(
                model="m", input=items, text_format=Move, max_output_tokens=400
            )
            assert response.output_parsed is not None
            items += [item.model_dump(exclude_unset=True) for item in response.output]
            items.append({**go, "content": "and again"})
            form: Any = {"model": "m", "max_tokens": 400, "output_config": {"format": schema}}
            if streamed:
                async with anthropic.messages.stream(**form, messages=said) as blocks:
                    message = await blocks.get_final_message()
            else:
                message = await anthropic.messages.create(**form, messages=said)
            assert Move.model_validate_json(message.content[0].text)  # type: ignore[union-attr]
            said += [{"role": "assistant", "content": message.content}, {**go, "content": "on"}]
    sequences = server.close("s").sequences
    assert [len(sequence.turns) for sequence in sequences] == [2, 2, 2]
    assert all(logprob_error(directory, sequence) < 1e-4 for sequence in sequences)


async def test_engines_that_cannot_constrain_answers_refuse_to_force_a_call() -> None:
    why = "these engines cannot"
    tool = {"type": "function", "function": tools(**STRICT)[0]}
    async with gateway(Script(), unconstrained=why) as (_, client):
        status, body = await client.post(ask(tools=[tool], tool_choice="required"))
        assert (status, body["error"]["param"]) == (400, "tool_choice")
        assert body["error"]["message"] == f"tool_choice must be auto or none: {why}"
        assert (await client.post(ask(tools=[tool])))[0] == 200
