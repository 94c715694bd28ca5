"""Messages between the agent and its environment. `rollout/chat/codec.py` turns them
into tokens.
"""

from typing import Literal

from rollweave.schema.base import Struct

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(Struct, frozen=True, kw_only=True):
    """The agent calls tool `name`.

    `arguments` is a JSON object; the tool's answer refers to `id`.
    """

    id: str = ""
    name: str
    arguments: str = "{}"


class Message(Struct, frozen=True, kw_only=True):
    """One message of a conversation. `tool_calls` belong to an assistant's message,
    `tool_call_id` and optionally `name` to a tool's.

    `finish_reason` is "length" if a token limit cut the agent's turn, else "". Chat
    templates do not see it. `thoughts` are an assistant's thoughts before the content;
    they stay in the content where thoughts and content are not divided.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    finish_reason: str = ""
    thoughts: str = ""

    @property
    def chars(self) -> int:
        """The number of characters that a chat template may show."""
        calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in self.tool_calls)
        texts = (self.content, self.thoughts, self.tool_call_id, self.name)
        return calls + sum(map(len, texts))
