"""The streams of APIs that send a turn as blocks: its text, then each of its calls.
Pure.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from rollweave.rollout.gateway.deltas import ContradictionError, TextDelta
from rollweave.rollout.gateway.responses import ChatReply, Json
from rollweave.schema.chat import ToolCall


class BlockStream(ABC):
    """The events of one turn. The text's block is number 0, if the turn has text."""

    def __init__(self) -> None:
        self._content = ""
        self._begun = False
        self._blocks = 0

    def progress(self, deltas: Sequence[TextDelta]) -> Iterator[Json]:
        """Yield events with the text that is certain before the turn is complete."""
        if text := "".join(delta.text for delta in deltas):
            yield from self._text(text)

    def rest(self, reply: ChatReply) -> Iterator[Json]:
        """Yield the other events of a complete turn.

        Raises ContradictionError if its message does not begin with what was sent.
        """
        message = reply.message
        if not message.content.startswith(self._content):
            raise ContradictionError("the message does not begin with the text that was sent")
        if left := message.content[len(self._content) :]:
            yield from self._text(left)
        if not self._begun:
            yield from self._begin()
        if self._blocks:
            yield from self._close_text(self._content)
        for call in message.tool_calls:
            yield from self._call(self._blocks, call)
            self._blocks += 1
        yield from self._end(reply)

    def _text(self, text: str) -> Iterator[Json]:
        if not self._begun:
            yield from self._begin()
        self._begun = True
        if not self._blocks:
            self._blocks = 1
            yield from self._open_text()
        self._content += text
        yield self._delta(text)

    @abstractmethod
    def _begin(self) -> Iterator[Json]:
        """Yield the events before the first block."""

    @abstractmethod
    def _open_text(self) -> Iterator[Json]:
        """Yield the events before the text."""

    @abstractmethod
    def _delta(self, text: str) -> Json:
        """Return an event with more of the text."""

    @abstractmethod
    def _close_text(self, text: str) -> Iterator[Json]:
        """Yield the events after the whole text."""

    @abstractmethod
    def _call(self, index: int, call: ToolCall) -> Iterator[Json]:
        """Yield the events of a call, which is block `index`."""

    @abstractmethod
    def _end(self, reply: ChatReply) -> Iterator[Json]:
        """Yield the events after the last block."""


def typed_event(event: Json) -> bytes:
    """Return an event as it is sent, with its type as its name."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
