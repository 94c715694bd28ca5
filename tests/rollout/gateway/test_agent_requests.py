"""Requests in the shapes that agent programs send as they are installed: all of them
are answered, and what nothing can read is recorded by its name.
"""

import json
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from rollweave.engine.clients.serving_metrics import ServingMetrics
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.rollout.gateway.fields import Unread
from rollweave.rollout.gateway.front import ServingFront
from rollweave.rollout.gateway.preparing import MOST, OTHERS, IgnoredFields
from rollweave.rollout.gateway.sessions import SessionLimits
from rollweave.schema.serving import GenerateRequest, GenerateResult
from tests.support.chats import codec
from tests.support.scripted_gateway import CALL, TOOL, Client, Script, engine_result, gateway

Json = dict[str, Any]
OF = codec("qwen")
USER: Json = {"role": "user", "content": "go"}
USES: Json = {"type": "tool_use", "id": "a", "name": "Read", "input": {}}
READS: Json = {"role": "assistant", "content": [USES]}
FUNCTION: Json = TOOL["function"]  # type: ignore[assignment]
CHAT, MESSAGES, RESPONSES = "/chat/completions", "/messages", "/responses"

CLAUDE: Json = {
    "model": "m",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f3a;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "go"}]}],
    "tools": [{"name": "add", "input_schema": FUNCTION["parameters"]}],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
CODEX: Json = {
    "model": "m",
    "instructions": "You are an agent.",
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "rules"}],
            "internal_chat_message_metadata_passthrough": {"turn_id": "t"},
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
    ],
    "tools": [
        {"type": "function", "strict": False, **FUNCTION},
        {
            "type": "namespace",
            "name": "team",
            "description": "others",
            "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
        },
        {
            "type": "custom",
            "name": "patch",
            "description": "edits files",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
        },
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session_id": "s"},
    "stream": True,
}
ASK: Json = {"model": "m", "messages": [USER]}
SENT: list[tuple[str, str, Json, set[str]]] = [
    ("claude-code", MESSAGES, CLAUDE, {"system.*.text", "output_config.effort"}),
    (
        "claude-code, other wishes",
        MESSAGES,
        {
            **CLAUDE,
            "context_management": {"edits": []},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "betas": ["context-management-2025-06-27"],
            "surprise": {"a": 1},
        },
        {"system.*.text", "output_config.effort", "thinking.budget_tokens", "surprise"},
    ),
    (
        "claude-code, an edit that drops something",
        MESSAGES,
        {
            "model": "m",
            "max_tokens": 9,
            "messages": [USER],
            "context_management": {
                "edits": [{"type": "clear_thinking_20251015", "keep": {"value": 1}}]
            },
            "tools": [
                {"type": "web_search_20250305", "name": "web_search"},
                {"name": "later", "input_schema": {}, "defer_loading": True},
            ],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        {
            "context_management.edits.*",
            "tools.*.type",
            "tools.*.defer_loading",
            "tool_choice.name",
        },
    ),
    (
        "claude-code, a document of a tool",
        MESSAGES,
        {
            "model": "m",
            "max_tokens": 9,
            "messages": [
                USER,
                READS,
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [
                                {"type": "document", "source": {"type": "base64", "data": "x"}},
                            ],
                        }
                    ],
                },
            ],
        },
        {"messages.*.content.*.content.*.type"},
    ),
    ("codex", RESPONSES, CODEX, {"tools.*.type"}),
    (
        "codex, verbose",
        RESPONSES,
        {**CODEX, "reasoning": {"effort": "high", "summary": "auto"}, "text": {"verbosity": "low"}},
        {"tools.*.type", "reasoning.effort", "text.verbosity"},
    ),
    (
        "openhands",
        CHAT,
        {
            **ASK,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {**USER, "content": [{"type": "text", "text": "go"}]},
            ],
            "reasoning_effort": "high",
            "tools": [TOOL],
            "temperature": 0.0,
        },
        {"reasoning_effort"},
    ),
    (
        "qwen-code",
        CHAT,
        {
            **ASK,
            "tools": [TOOL],
            "max_tokens": 8000,
            "stream": True,
            "stream_options": {"include_usage": True},
            "vl_high_resolution_images": True,
        },
        {"vl_high_resolution_images"},
    ),
    ("opencode", CHAT, {**ASK, "tools": [TOOL], "tool_choice": "auto", "stream": True}, set()),
    ("aider", CHAT, {**ASK, "stream": True, "temperature": 0}, set()),
    ("mini-swe-agent", CHAT, {**ASK, "tools": [TOOL], "drop_params": True}, {"drop_params"}),
    ("smolagents", CHAT, {**ASK, "stop": ["Observation:", "</code>"]}, set()),
    (
        "audio in a tool's result",
        CHAT,
        {
            **ASK,
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "see"}}]},
                {
                    "role": "tool",
                    "tool_call_id": "a",
                    "content": [
                        {"type": "text", "text": "here: "},
                        {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
                    ],
                },
            ],
        },
        {"messages.*.content.*.type"},
    ),
]


async def send(client: Client, path: str, body: Json) -> tuple[int, set[str], str]:
    """Return the status, the names of ignored fields, and the text of an answer."""
    head = {"Authorization": f"Bearer {client.access.token}"}
    async with client.http.post(client.base_url + path, json=body, headers=head) as response:
        named = response.headers.get("X-Rollweave-Ignored", "").split(", ")
        return response.status, {each for each in named if each}, await response.text()


@pytest.mark.parametrize(
    ("path", "body", "unread"), [case[1:] for case in SENT], ids=[case[0] for case in SENT]
)
async def test_requests_of_agent_programs_are_answered(
    path: str, body: Json, unread: set[str]
) -> None:
    script, strict = Script(["It is 5."], codec=OF), {"unreadable": "refuse"}
    async with gateway(script, of=OF) as (server, client):
        status, named, text = await send(client, path, body)
        assert (status, named) == (200, unread), text
        recorded = server.session("s").ignored.entries()
        assert {each.field for each in recorded} == unread
        assert all(each.requests == 1 and each.value for each in recorded)
        prompt = OF.decode(script.requests[0][1])
        assert "billing" not in prompt
    async with gateway(script, of=OF, session=strict) as (_, client):
        assert (await send(client, path, body))[0] == (400 if unread else 200)


PICTURES = [
    (
        CHAT,
        {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
    ),
    (
        RESPONSES,
        {"input": [{**USER, "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0.type",
    ),
    (
        MESSAGES,
        {
            "max_tokens": 9,
            "messages": [
                USER,
                READS,
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [{"type": "image", "source": {"type": "base64"}}],
                        }
                    ],
                },
            ],
        },
        "messages.2.content.0.content.0.type",
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), PICTURES)
async def test_a_text_stands_in_the_place_of_an_image(path: str, body: Json, field: str) -> None:
    script, strict = Script(["It is 5."], codec=OF), {"unreadable": "refuse"}
    async with gateway(script, of=OF) as (server, client):
        status, _, text = await send(client, path, {"model": "m", **body})
        assert status == 200, text
        assert "which cannot be shown here]" in OF.decode(script.requests[0][1])
        (recorded,) = server.session("s").ignored.entries()
        assert recorded.action == "replaced by a text"
    async with gateway(script, of=OF, session=strict) as (_, client):
        status, _, text = await send(client, path, {"model": "m", **body})
    assert status == 400
    assert f"{field} must be text" in text


CALLED = [
    ("team.spawn", {"task": "x"}, {"type": "function_call", "name": "spawn", "namespace": "team"}),
    ("patch", {"input": "*** Begin\n+5"}, {"type": "custom_tool_call", "input": "*** Begin\n+5"}),
    (
        "local_shell",
        {"command": ["ls"], "timeout_ms": 5},
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "env": {}, "command": ["ls"], "timeout_ms": 5},
        },
    ),
    ("add", {"a": 1}, {"type": "function_call", "name": "add", "arguments": '{"a": 1}'}),
]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"), CALLED, ids=[case[0] for case in CALLED]
)
async def test_tools_of_the_responses_api_are_called_and_their_calls_come_back(
    name: str, arguments: Json, expected: Json
) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    script = Script([f"<tool_call>\n{call}\n</tool_call>", "Done."], codec=OF)
    async with gateway(script, of=OF) as (server, client):
        body = {**CODEX, "stream": False}
        _, answer = await client.post(body, path=RESPONSES)
        (item,) = answer["output"]
        assert item.items() >= expected.items()
        output = {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "5"}
        again = {**body, "input": [*CODEX["input"], item, output]}
        assert (await client.post(again, path=RESPONSES))[0] == 200
        (sequence,) = server.sequences("s")
        assert len(sequence.turns) == 2
        assert "start: /.+/" in OF.decode(script.requests[0][1])


async def test_each_api_has_its_own_words_for_a_prompt_that_is_too_long() -> None:
    session = {"limits": SessionLimits(context=8)}
    async with gateway(Script(), of=OF, session=session) as (_, client):
        _, answer = await client.post({**ASK, "max_tokens": 9}, path=MESSAGES + "/count_tokens")
        tokens = answer["input_tokens"]
        _, answer = await client.post(ASK)
        assert answer["error"]["code"] == "context_length_exceeded"
        assert (
            f"context length is 8 tokens. However, your messages resulted in {tokens}"
            in (answer["error"]["message"])
        )
        _, answer = await client.post({**ASK, "max_tokens": 9}, path=MESSAGES)
        assert answer["error"]["message"] == f"prompt is too long: {tokens} tokens > 8 maximum"
        asked = {"model": "m", "input": [USER]}
        _, answer = await client.post(asked, path=RESPONSES + "/input_tokens")
        assert answer["input_tokens"] == tokens
        _, answer = await client.post(asked, path=RESPONSES)
        assert answer["error"]["code"] == "context_length_exceeded"
        # Clients of the Responses API read the code in a stream only.
        status, _, text = await send(client, RESPONSES, {**asked, "stream": True})
    assert (status, text.count("event: ")) == (200, 2)
    assert '"type": "response.failed"' in text
    assert '"code": "context_length_exceeded"' in text


async def test_the_addresses_that_programs_probe_are_served() -> None:
    async with gateway(Script(), of=OF) as (_, client):
        head = {"X-Api-Key": client.access.token}
        for method, path, status in (
            ("HEAD", "", 200),
            ("GET", "", 200),
            ("GET", "/models", 200),
            ("GET", "/models/a/b", 200),
            ("GET", "/responses", 426),
        ):
            url = client.base_url + path
            async with client.http.request(method, url, headers=head) as response:
                assert response.status == status, path
        async with client.http.get(client.base_url + "/models/a/b", headers=head) as response:
            assert (await response.json())["id"] == "a/b"
        root = client.base_url.removesuffix("/v1")
        async with client.http.head(root) as response:
            assert response.status == 200


def test_what_is_recorded_is_bounded() -> None:
    ignored = IgnoredFields()
    for number in range(2 * MOST):
        ignored.add([Unread(field=f"x{number}", value=number, rule="must be null")] * 2)
    entries = ignored.entries()
    assert len(entries) == MOST + 1
    assert (entries[0].requests, entries[-1].field, entries[-1].requests) == (1, OTHERS, MOST)


class Server:
    """An engine's server, as far as the front uses it: it always calls a tool."""

    def __init__(self) -> None:
        self.metrics, self.model = ServingMetrics(), "m"

    def has_room(self, count: int) -> bool:
        return count > 0

    async def generate(self, request: GenerateRequest, *_: Any, **__: Any) -> GenerateResult:
        result = engine_result(OF.encode_turn(CALL))
        return msgspec.structs.replace(result, id=request.id)


async def test_the_calls_of_an_engines_answers_have_different_ids(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A program's conversation is many requests there, and it drops a call whose id it
    has seen. What is ignored is logged once.
    """
    app = web.Application()
    ServingFront(Server(), OF, context=4096).add_to(app)  # type: ignore[arg-type]
    ids = []
    async with (
        listening(app, "127.0.0.1", 0, guard=Guard(token=None), shutdown_s=1.0) as url,
        aiohttp.ClientSession() as http,
    ):
        for _ in range(2):
            body = {**ASK, "tools": [TOOL], "surprise": 1}
            async with http.post(f"{url}/v1{CHAT}", json=body) as response:
                answer = await response.json()
                assert response.headers["X-Rollweave-Ignored"] == "surprise"
            ids += [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    assert [record.message for record in caplog.records] == ["ignored: surprise = 1"]
