"""Scripted agents, and the lifecycle of a handler with one, over real sandboxes."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rollweave.envs.base import Score
from rollweave.envs.handlers.base import Endpoint, Job, LimitError, Tool
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.work import StopReason, Task, Unreadable
from tests.support.sandboxes import needs

Reply = Message | str | Exception


class Scripted:
    """Sends its replies in turn, or the result of a function of the messages; an
    exception is raised.
    """

    def __init__(
        self, replies: Sequence[Reply] | Callable[[Sequence[Message]], Reply], *, turns: int = 20
    ) -> None:
        self._replies = replies if callable(replies) else iter([*replies])
        self.turns_left = turns
        self.messages: list[Message] = []
        self.tools: list[Sequence[Tool]] = []

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
    ) -> Message:
        self.messages = list(messages)
        self.tools.append(tools)
        if not self.turns_left:
            raise LimitError(StopReason.MAX_TURNS, "no turns left")
        self.turns_left -= 1
        reply = self._replies(messages) if callable(self._replies) else next(self._replies)
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, Message) else Message(role="assistant", content=reply)

    async def endpoint(self, *, unreadable: Unreadable = "ignore") -> Endpoint:
        raise NotImplementedError


def calls(*named: tuple[str, Any], content: str = "") -> Message:
    """Return a message that calls tools, each with arguments: a dict, or literal
    text.
    """
    tool_calls = [
        ToolCall(
            id=f"call-{number}",
            name=name,
            arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
        )
        for number, (name, arguments) in enumerate(named)
    ]
    return Message(role="assistant", content=content, tool_calls=tuple(tool_calls))


@asynccontextmanager
async def sandboxes() -> AsyncIterator[Sandboxes]:
    needs("zygote")
    started = Sandboxes("zygote")
    try:
        yield started
    finally:
        await started.close()


async def attempt(handler: Any, task: Task, agent: Scripted, boxes: Sandboxes) -> Score:
    """Run a handler as the driver does; a limit counts as an end."""
    await handler.init(Job(task=task, seed=0, sandboxes=boxes))
    try:
        await handler.run(agent)
    except LimitError:
        pass
    finally:
        await handler.close()
    score = await handler.eval()
    assert isinstance(score, Score)
    return score
