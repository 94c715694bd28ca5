"""Words between the agent and its environment. What the tokens are is a matter of `codec/chat.py`."""

from typing import Literal

from rollweave.schema.base import Noun

Role = Literal["system", "user", "assistant", "tool"]


class Message(Noun, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Role
    content: str
