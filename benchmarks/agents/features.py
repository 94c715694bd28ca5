"""The features that a request may ask for, in the terms of each API, and how to see
whether they were given.

Each case is a request to a gateway whose agent says what is written down. It works if
what was asked for can be seen in the answer, in how the turn was sampled, or in the
prompt. It is recorded if it was ignored and the answer names it. It is refused if the
answer is an error of one line that names the field. Otherwise it was ignored in
silence, which must never be.
"""

import enum
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from benchmarks.agents.scripted import CALL, CALLS, scripted
from benchmarks.agents.wire import BODIES, USER, Answer, Json, post
from rollweave.schema.base import Struct
from rollweave.schema.serving import Sampling


class Outcome(enum.StrEnum):
    """The outcome of a request."""

    WORKS = "works"
    REFUSED = "refused"
    RECORDED = "recorded"  # ignored, which the trace and the answer's header say
    IGNORED = "silently ignored"
    FAILED = "failed"  # neither honored nor refused by the name of a field


class Cell(Struct, frozen=True, kw_only=True):
    """One client and one feature. `detail` is the error of what was refused."""

    outcome: Outcome
    detail: str = ""


class Seen(Struct, frozen=True, kw_only=True):
    """The visible effects of a request that was answered."""

    answer: Answer
    prompt: str
    sampling: Sampling
    gateway: Any


Check = Callable[[Seen], bool]


class Feature(Struct, frozen=True, kw_only=True):
    """A feature: the fields that ask for it in each API that has it, the check of what
    was answered, and what the agent says. The name of the field that a refusal must
    have is the first one, unless it is in `named`.
    """

    name: str
    asks: Mapping[str, Json]
    check: Check
    says: Sequence[str] = ("It is 5.",)
    named: str = ""


def never(_: Seen) -> bool:
    """Return false: no answer of a model of text can honor it."""
    return False


SCHEMA: Final[Json] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
FUNCTION: Final[Json] = {
    "name": "add",
    "description": "The sum of two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}
TOOLS: Final[dict[str, list[Json]]] = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "responses": [{"type": "function", **FUNCTION}],
    "messages": [
        {
            "name": FUNCTION["name"],
            "description": FUNCTION["description"],
            "input_schema": FUNCTION["parameters"],
        }
    ],
}
WITH_TOOLS: Final = {api: {"tools": tools} for api, tools in TOOLS.items()}
PIXEL: Final = "data:image/png;base64,iVBORw0KGgo="


def _in_all(change: Json, *apis: str) -> dict[str, Json]:
    return dict.fromkeys(apis or tuple(BODIES), change)


def _with_tools(**changes: Json) -> dict[str, Json]:
    return {api: {**WITH_TOOLS[api], **change} for api, change in changes.items()}


def _counted(seen: Seen) -> bool:
    (sequence,) = seen.gateway.sequences()
    return bool(seen.answer.output_tokens == sum(sequence.output_mask()))


def _has_logprobs(seen: Seen) -> bool:
    (sequence,) = seen.gateway.sequences()
    shown = json.dumps(seen.answer.body)
    first = sequence.logprobs[sequence.turns[0].start]
    return f'"logprob": {first}' in shown or f'"token_logprobs": [{first}' in shown


def _sampled_with(**values: Any) -> Check:
    def check(seen: Seen) -> bool:
        return all(getattr(seen.sampling, name) == value for name, value in values.items())

    return check


def _constrained(kind: str) -> Check:
    def check(seen: Seen) -> bool:
        return seen.sampling.constraint is not None and seen.sampling.constraint.kind == kind

    return check


def _one_sequence(seen: Seen) -> bool:
    (sequence,) = seen.gateway.sequences()
    return len(sequence.turns) == 1 and "<tool_response>\n5\n</tool_response>" in seen.prompt


ADDED: Final = ("add", {"a": 2, "b": 3})
RESULTS: Final[dict[str, Json]] = {
    "chat": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
        ]
    },
    "responses": {
        "input": [
            USER,
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "add",
                "arguments": '{"a": 2, "b": 3}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "5"},
        ]
    },
    "messages": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2, "b": 3}}
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "5"}],
            },
        ]
    },
}
IMAGES: Final[dict[str, Json]] = {
    "chat": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}
        ]
    },
    "responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}]
    },
    "messages": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {
                            "type": "base64",
                            "media_type": "image/png",
                            "data": PIXEL.partition(",")[2],
                        },
                    }
                ],
            }
        ]
    },
}

FEATURES: Final[tuple[Feature, ...]] = (
    Feature(name="plain", asks=_in_all({}), check=lambda seen: seen.answer.text == "It is 5."),
    Feature(
        name="streamed",
        asks=_in_all({"stream": True}),
        check=lambda seen: seen.answer.text == "It is 5." and seen.answer.parts > 1,
    ),
    Feature(name="usage", asks=_in_all({}), check=_counted),
    Feature(
        name="usage of a stream",
        asks={
            **_in_all(
                {"stream": True, "stream_options": {"include_usage": True}}, "chat", "completions"
            ),
            **_in_all({"stream": True}, "responses", "messages"),
        },
        check=_counted,
    ),
    Feature(
        name="system message",
        asks={
            "chat": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
            "responses": {"instructions": "Be brief."},
            "messages": {"system": "Be brief."},
        },
        check=lambda seen: "<|im_start|>system\nBe brief.<|im_end|>" in seen.prompt,
    ),
    Feature(
        name="tools",
        asks=WITH_TOOLS,
        check=lambda seen: seen.answer.calls == (ADDED,) and '"name": "add"' in seen.prompt,
        says=(CALL,),
    ),
    Feature(
        name="tools, streamed",
        asks=_with_tools(**_in_all({"stream": True}, *TOOLS)),
        check=lambda seen: seen.answer.calls == (ADDED,),
        says=(CALL,),
    ),
    Feature(
        name="parallel calls",
        asks=WITH_TOOLS,
        check=lambda seen: seen.answer.calls == (ADDED, ("add", {"a": 4, "b": 3})),
        says=(CALLS,),
    ),
    Feature(
        name="one call at a time",
        asks=_with_tools(
            chat={"parallel_tool_calls": False},
            responses={"parallel_tool_calls": False},
            messages={"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
        check=lambda seen: "</tool_call>" in seen.sampling.stop,
    ),
    Feature(
        name="a call is required",
        asks=_with_tools(
            chat={"tool_choice": "required"},
            responses={"tool_choice": "required"},
            messages={"tool_choice": {"type": "any"}},
        ),
        check=lambda seen: seen.sampling.constraint is not None and bool(seen.answer.calls),
        says=(CALL,),
    ),
    Feature(
        name="no call may be made",
        asks=_with_tools(
            chat={"tool_choice": "none"},
            responses={"tool_choice": "none"},
            messages={"tool_choice": {"type": "none"}},
        ),
        check=lambda seen: not seen.answer.calls and seen.answer.text == CALL,
        says=(CALL,),
    ),
    Feature(name="tool results", asks=RESULTS, check=_one_sequence),
    Feature(
        name="temperature, top_p",
        asks=_in_all({"temperature": 0.5, "top_p": 0.75}),
        check=_sampled_with(temperature=0.5, top_p=0.75),
    ),
    Feature(
        name="top_k",
        asks=_in_all({"top_k": 7}),
        check=_sampled_with(top_k=7),
    ),
    Feature(name="seed", asks=_in_all({"seed": 7}), check=_sampled_with(seed=7)),
    Feature(
        name="token limit",
        asks={
            **_in_all({"max_tokens": 3}, "chat", "completions", "messages"),
            "responses": {"max_output_tokens": 3},
        },
        check=lambda seen: seen.answer.output_tokens == 3,
    ),
    Feature(
        name="stop texts",
        asks={
            **_in_all({"stop": [" is"]}, "chat", "completions", "responses"),
            "messages": {"stop_sequences": [" is"]},
        },
        check=lambda seen: seen.answer.text == "It" and " is" in seen.sampling.stop,
    ),
    Feature(
        name="log-probs",
        asks={
            "chat": {"logprobs": True},
            "completions": {"logprobs": 0},
            "responses": {"top_logprobs": 1, "include": ["message.output_text.logprobs"]},
        },
        check=_has_logprobs,
        named="top_logprobs",
    ),
    Feature(
        name="top-5 log-probs",
        asks={
            "chat": {"top_logprobs": 5, "logprobs": True},
            "completions": {"logprobs": 5},
            "responses": {"top_logprobs": 5},
        },
        check=never,
    ),
    Feature(
        name="JSON schema",
        asks={
            **_in_all(
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                    }
                },
                "chat",
                "completions",
            ),
            "responses": {
                "text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
            },
            "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        },
        check=_constrained("json"),
    ),
    Feature(
        name="JSON schema that cannot be constrained",
        asks={
            "chat": {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"not": {}}},
                }
            },
            "responses": {
                "text": {"format": {"type": "json_schema", "name": "answer", "schema": {"not": {}}}}
            },
            "messages": {
                "output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}
            },
        },
        check=never,
    ),
    Feature(
        name="regular expression",
        asks=_in_all({"structured_outputs": {"regex": "[0-9]+"}}, "chat", "completions"),
        check=_constrained("regex"),
    ),
    Feature(
        name="grammar",
        asks=_in_all({"structured_outputs": {"grammar": "root ::= [0-9]"}}, "chat", "completions"),
        check=never,
    ),
    Feature(
        name="template arguments",
        asks=_in_all(
            {"chat_template_kwargs": {"enable_thinking": False}}, "chat", "responses", "messages"
        ),
        check=lambda seen: seen.prompt.endswith("<think>\n\n</think>\n\n"),
    ),
    Feature(
        name="reasoning effort (not in the template)",
        asks={
            "chat": {"reasoning_effort": "high"},
            "responses": {"reasoning": {"effort": "high"}},
            "messages": {"output_config": {"effort": "high"}},
        },
        check=never,
        named="",
    ),
    Feature(
        name="reasoning budget",
        asks={
            "chat": {"thinking_token_budget": 1024},
            "messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        },
        check=never,
    ),
    Feature(
        name="thoughts",
        asks={"chat": {}, "responses": {}, "messages": {}},
        check=lambda seen: "Five" in json.dumps(seen.answer.body) and seen.answer.text == "5",
        says=("<think>\nFive.\n</think>\n\n5",),
    ),
    Feature(
        name="reasoning summary",
        asks={"responses": {"reasoning": {"summary": "auto"}}},
        check=lambda seen: '"summary_text"' in json.dumps(seen.answer.body),
        says=("<think>\nFive.\n</think>\n\n5",),
    ),
    Feature(name="images", asks=IMAGES, check=never),
    Feature(
        name="audio output",
        asks={"chat": {"modalities": ["text", "audio"], "audio": {"voice": "a", "format": "wav"}}},
        check=never,
    ),
    Feature(name="n of 2", asks=_in_all({"n": 2}), check=never),
    Feature(name="best_of", asks={"completions": {"best_of": 2}}, check=never),
    Feature(name="echo", asks={"completions": {"echo": True}}, check=never),
    Feature(name="suffix", asks={"completions": {"suffix": "."}}, check=never),
    Feature(name="logit bias", asks=_in_all({"logit_bias": {"1": 5}}), check=never),
    Feature(name="penalties", asks=_in_all({"frequency_penalty": 1}), check=never),
    Feature(name="min_p", asks=_in_all({"min_p": 0.1}), check=never),
    Feature(
        name="allowed tokens",
        asks=_in_all({"allowed_token_ids": [1, 2]}, "chat", "completions"),
        check=_sampled_with(allowed=(1, 2)),
    ),
    Feature(
        name="server-side tools",
        asks={
            "chat": {"web_search_options": {}},
            "responses": {"tools": [{"type": "web_search"}]},
            "messages": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        },
        check=never,
    ),
    Feature(
        name="stored conversation",
        asks={"responses": {"previous_response_id": "resp_1"}},
        check=never,
    ),
    Feature(name="background mode", asks={"responses": {"background": True}}, check=never),
    Feature(
        name="prompt truncation",
        asks={
            "chat": {"truncate_prompt_tokens": 10},
            "completions": {"truncate_prompt_tokens": 10},
            "responses": {"truncation": "auto"},
            "messages": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        },
        check=never,
    ),
    Feature(
        name="verbosity",
        asks={"chat": {"verbosity": "low"}, "responses": {"text": {"verbosity": "low"}}},
        check=never,
    ),
    Feature(
        name="an unknown field",
        asks=_in_all({"surprise": 1}),
        check=never,
    ),
    Feature(
        name="an unknown nested field",
        asks={
            "chat": {
                "messages": [
                    *RESULTS["chat"]["messages"][:2],
                    {**RESULTS["chat"]["messages"][2], "surprise": 1},
                ]
            },
            "responses": {
                "input": [
                    *RESULTS["responses"]["input"][:2],
                    {**RESULTS["responses"]["input"][2], "surprise": 1},
                ]
            },
            "messages": {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "x", "surprise": 1}]}
                ]
            },
        },
        check=never,
        named="surprise",
    ),
)


async def try_feature(feature: Feature, api: str) -> Cell:
    """Request the feature through one API."""
    named = feature.named or _first_field(feature.asks[api])
    async with scripted(*feature.says) as gateway:
        answer = await post(gateway, api, {**BODIES[api], **feature.asks[api]})
        if answer.status == 200:
            seen = Seen(
                answer=answer,
                prompt=gateway.prompt(),
                sampling=gateway.script.samplings[-1],
                gateway=gateway,
            )
            if feature.check(seen):
                return Cell(outcome=Outcome.WORKS)
            recorded = names(named, answer.ignored)
            return Cell(
                outcome=Outcome.RECORDED if recorded else Outcome.IGNORED, detail=answer.ignored
            )
    error = answer.error
    is_named = answer.status == 400 and "\n" not in error and names(named, error)
    return Cell(outcome=Outcome.REFUSED if is_named else Outcome.FAILED, detail=error)


def names(field: str, error: str) -> bool:
    """Return whether an error has a field's name as a word."""
    return re.search(rf"(?<![\w-]){re.escape(field)}(?![\w-])", error) is not None


def _first_field(asked: Json) -> str:
    """Return the name of the first field that is asked for."""
    return next(iter(asked), "")
