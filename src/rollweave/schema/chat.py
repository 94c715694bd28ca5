"""Words between the agent and its environment.

What the tokens are is a matter of `rollout/chat/codec.py`.
"""

from typing import Literal

from rollweave.schema.base import Struct

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(Struct, frozen=True, kw_only=True):
    """The agent asks for tool `name`.

    `arguments` is JSON, an object; `id` is what the tool's answer refers to.
    """

    id: str = ""
    name: str
    arguments: str = "{}"


class Message(Struct, frozen=True, kw_only=True):
    """One message of a conversation. `tool_calls` are an assistant's; `tool_call_id`
    and perhaps `name` are a tool's.

    `finish_reason` is "length" if a token limit cut what the agent sampled, else "".
    Chat templates do not see it.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    finish_reason: str = ""
