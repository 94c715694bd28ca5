"""The table of features that a request may ask for."""

import json
from typing import Any, Final

from benchmarks.agents.feature_requests import (
    IMAGES,
    RESULTS,
    SCHEMA,
    TOOLS,
    WITH_TOOLS,
    formats,
    in_all,
    user,
    with_surprise,
    with_tools,
)
from benchmarks.agents.features import Check, Feature, Seen, never
from benchmarks.agents.scripted import CALL, CALLS
from benchmarks.agents.wire import USER

ADDED: Final = ("add", {"a": 2, "b": 3})


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


FEATURES: Final[tuple[Feature, ...]] = (
    Feature("plain", in_all({}), lambda seen: seen.answer.text == "It is 5."),
    Feature(
        "streamed",
        in_all({"stream": True}),
        lambda seen: seen.answer.text == "It is 5." and seen.answer.parts > 1,
    ),
    Feature("usage", in_all({}), _counted),
    Feature(
        "usage of a stream",
        {
            **in_all(
                {"stream": True, "stream_options": {"include_usage": True}}, "chat", "completions"
            ),
            **in_all({"stream": True}, "responses", "messages"),
        },
        _counted,
    ),
    Feature(
        "system message",
        {
            "chat": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
            "responses": {"instructions": "Be brief."},
            "messages": {"system": "Be brief."},
        },
        lambda seen: "<|im_start|>system\nBe brief.<|im_end|>" in seen.prompt,
    ),
    Feature(
        "tools",
        WITH_TOOLS,
        lambda seen: seen.answer.calls == (ADDED,) and '"name": "add"' in seen.prompt,
        says=(CALL,),
    ),
    Feature(
        "tools, streamed",
        with_tools(**in_all({"stream": True}, *TOOLS)),
        lambda seen: seen.answer.calls == (ADDED,),
        says=(CALL,),
    ),
    Feature(
        "parallel calls",
        WITH_TOOLS,
        lambda seen: seen.answer.calls == (ADDED, ("add", {"a": 4, "b": 3})),
        says=(CALLS,),
    ),
    Feature(
        "one call at a time",
        with_tools(
            chat={"parallel_tool_calls": False},
            responses={"parallel_tool_calls": False},
            messages={"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
        lambda seen: "</tool_call>" in seen.sampling.stop,
    ),
    Feature(
        "a call is required",
        with_tools(
            chat={"tool_choice": "required"},
            responses={"tool_choice": "required"},
            messages={"tool_choice": {"type": "any"}},
        ),
        lambda seen: seen.sampling.constraint is not None and bool(seen.answer.calls),
        says=(CALL,),
    ),
    Feature(
        "no call may be made",
        with_tools(
            chat={"tool_choice": "none"},
            responses={"tool_choice": "none"},
            messages={"tool_choice": {"type": "none"}},
        ),
        lambda seen: not seen.answer.calls and seen.answer.text == CALL,
        says=(CALL,),
    ),
    Feature("tool results", RESULTS, _one_sequence),
    Feature(
        "temperature, top_p",
        in_all({"temperature": 0.5, "top_p": 0.75}),
        _sampled_with(temperature=0.5, top_p=0.75),
    ),
    Feature("top_k", in_all({"top_k": 7}), _sampled_with(top_k=7)),
    Feature("seed", in_all({"seed": 7}), _sampled_with(seed=7)),
    Feature(
        "token limit",
        {
            **in_all({"max_tokens": 3}, "chat", "completions", "messages"),
            "responses": {"max_output_tokens": 3},
        },
        lambda seen: seen.answer.output_tokens == 3,
    ),
    Feature(
        "stop texts",
        {
            **in_all({"stop": [" is"]}, "chat", "completions", "responses"),
            "messages": {"stop_sequences": [" is"]},
        },
        lambda seen: seen.answer.text == "It" and " is" in seen.sampling.stop,
    ),
    Feature(
        "log-probs",
        {
            "chat": {"logprobs": True},
            "completions": {"logprobs": 0},
            "responses": {"top_logprobs": 1, "include": ["message.output_text.logprobs"]},
        },
        _has_logprobs,
        named="top_logprobs",
    ),
    Feature(
        "top-5 log-probs",
        {
            "chat": {"top_logprobs": 5, "logprobs": True},
            "completions": {"logprobs": 5},
            "responses": {"top_logprobs": 5},
        },
        never,
    ),
    Feature("JSON schema", formats(SCHEMA), _constrained("json")),
    Feature("JSON schema that cannot be constrained", formats({"not": {}})),
    Feature(
        "regular expression",
        in_all({"structured_outputs": {"regex": "[0-9]+"}}, "chat", "completions"),
        _constrained("regex"),
    ),
    Feature(
        "grammar",
        in_all({"structured_outputs": {"grammar": "root ::= [0-9]"}}, "chat", "completions"),
        never,
    ),
    Feature(
        "template arguments",
        in_all(
            {"chat_template_kwargs": {"enable_thinking": False}}, "chat", "responses", "messages"
        ),
        lambda seen: seen.prompt.endswith("<think>\n\n</think>\n\n"),
    ),
    Feature(
        "reasoning effort (not in the template)",
        {
            "chat": {"reasoning_effort": "high"},
            "responses": {"reasoning": {"effort": "high"}},
            "messages": {"output_config": {"effort": "high"}},
        },
    ),
    Feature(
        "reasoning budget",
        {
            "chat": {"thinking_token_budget": 1024},
            "messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        },
        never,
    ),
    Feature(
        "thoughts",
        {"chat": {}, "responses": {}, "messages": {}},
        lambda seen: "Five" in json.dumps(seen.answer.body) and seen.answer.text == "5",
        says=("<think>\nFive.\n</think>\n\n5",),
    ),
    Feature(
        "reasoning summary",
        {"responses": {"reasoning": {"summary": "auto"}}},
        lambda seen: '"summary_text"' in json.dumps(seen.answer.body),
        says=("<think>\nFive.\n</think>\n\n5",),
    ),
    Feature("images", IMAGES),
    Feature(
        "audio output",
        {"chat": {"modalities": ["text", "audio"], "audio": {"voice": "a", "format": "wav"}}},
        never,
    ),
    Feature("n of 2", in_all({"n": 2})),
    Feature("best_of", {"completions": {"best_of": 2}}),
    Feature("echo", {"completions": {"echo": True}}),
    Feature("suffix", {"completions": {"suffix": "."}}),
    Feature("logit bias", in_all({"logit_bias": {"1": 5}})),
    Feature("penalties", in_all({"frequency_penalty": 1})),
    Feature("min_p", in_all({"min_p": 0.1})),
    Feature(
        "allowed tokens",
        in_all({"allowed_token_ids": [1, 2]}, "chat", "completions"),
        _sampled_with(allowed=(1, 2)),
    ),
    Feature(
        "server-side tools",
        {
            "chat": {"web_search_options": {}},
            "responses": {"tools": [{"type": "web_search"}]},
            "messages": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        },
        never,
    ),
    Feature("stored conversation", {"responses": {"previous_response_id": "resp_1"}}, never),
    Feature("background mode", {"responses": {"background": True}}),
    Feature(
        "prompt truncation",
        {
            "chat": {"truncate_prompt_tokens": 10},
            "completions": {"truncate_prompt_tokens": 10},
            "responses": {"truncation": "auto"},
            "messages": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        },
        never,
    ),
    Feature(
        "verbosity",
        {"chat": {"verbosity": "low"}, "responses": {"text": {"verbosity": "low"}}},
        never,
    ),
    Feature("an unknown field", in_all({"surprise": 1}), never),
    Feature(
        "an unknown nested field",
        {
            "chat": with_surprise("chat", "messages"),
            "responses": with_surprise("responses", "input"),
            "messages": {"messages": [user({"type": "text", "text": "x", "surprise": 1})]},
        },
        named="surprise",
    ),
)
