"""The agent of an attempt as the model of an environment of verifiers.

Import it only where the package verifiers is installed.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.clients import Client
from verifiers.errors import ModelError, OverlongPromptError
from verifiers.types import Response, ResponseMessage
from verifiers.types import ToolCall as VerifiersToolCall

from rollweave.envs.handlers.base import Agent, LimitError, Tool
from rollweave.schema.chat import Message, ToolCall


class AgentClient(Client):  # type: ignore[misc]
    """A client of verifiers whose model is the agent.

    `loop` is the event loop of the attempt; requests come from another one. The run
    decides how the agent samples, so sampling arguments other than a limit of tokens
    are left out. Once the agent has used up its turns or its context, a request raises
    `OverlongPromptError`, with which verifiers ends a rollout in order.
    """

    def __init__(self, agent: Agent, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(agent)
        self._agent, self._loop = agent, loop

    async def get_response(
        self,
        prompt: Sequence[Any],
        model: str,
        sampling_args: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Response:
        """Return the agent's next message. Raises errors of verifiers."""
        limit = sampling_args.get("max_tokens") or sampling_args.get("max_completion_tokens")
        try:
            asked = self._agent.chat(
                [message_of(message) for message in prompt],
                tools=[tool_of(tool) for tool in tools or ()],
                max_tokens=limit,
            )
            message = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._loop))
        except LimitError as error:
            raise OverlongPromptError(str(error)) from error
        except Exception as error:
            raise ModelError(str(error)) from error
        return response_of(message, model)

    # `get_response` needs none of the conversions of other clients.

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError

    async def to_native_tool(self, tool: Any) -> Any:
        raise NotImplementedError

    async def to_native_prompt(self, messages: Any) -> Any:
        raise NotImplementedError

    async def get_native_response(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    async def raise_from_native_response(self, response: Any) -> None:
        raise NotImplementedError

    async def from_native_response(self, response: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        """Close nothing: the agent belongs to its attempt."""


def message_of(message: Any) -> Message:
    """Return a message of verifiers as ours. Raises ValueError for one with more than
    text.
    """
    if message.get("reasoning_content"):
        raise ValueError("messages must not have reasoning_content: it belongs in the content")
    role: Any = "user" if message.role == "text" else message.role
    calls = tuple(
        ToolCall(id=call.id, name=call.name, arguments=call.arguments)
        for call in message.get("tool_calls") or ()
    )
    return Message(
        role=role,
        content=_text(message.content),
        tool_calls=calls,
        tool_call_id=message.get("tool_call_id") or "",
    )


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    text = ""
    for part in content:
        plain = part if isinstance(part, Mapping) else part.model_dump()
        if plain.get("type") != "text":
            raise ValueError(f"messages must be text, got a part of type {plain.get('type')!r}")
        text += plain["text"]
    return text


def tool_of(tool: Any) -> Tool:
    """Return a declared tool. The environment itself answers its calls."""

    async def answered(arguments: dict[str, Any]) -> str:
        raise NotImplementedError(f"the environment answers calls of {tool.name}")

    return Tool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        call=answered,
    )


def response_of(message: Message, model: str) -> Response:
    """Return the agent's message as the answer of a model."""
    cut = message.finish_reason == "length"
    calls = [
        VerifiersToolCall(id=call.id, name=call.name, arguments=call.arguments)
        for call in message.tool_calls
    ]
    reason = "length" if cut else "tool_calls" if calls else "stop"
    return Response(
        id=uuid.uuid4().hex,
        created=int(time.time()),
        model=model,
        message=ResponseMessage(
            content=message.content,
            tool_calls=calls or None,
            finish_reason=reason,
            is_truncated=cut,
        ),
    )
