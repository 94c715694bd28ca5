"""The streams of APIs that send a turn as blocks: the thoughts, the text, then each
call. Pure.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final

from rollweave.rollout.gateway.deltas import TextDelta
from rollweave.rollout.gateway.responses import ChatReply, Json, check_begun
from rollweave.schema.chat import ToolCall

THOUGHTS: Final = "thoughts"
TEXT: Final = "text"
"""Kinds of blocks."""


class BlockStream(ABC):
    """The events of one turn: a block of thoughts, a block of text, and a block for
    each call, as far as the turn has them.
    """

    def __init__(self) -> None:
        self._begun = False
        self._blocks = 0
        """Number of complete blocks, and therefore the number of the next block."""
        self._open = ""
        """The kind of the block that is being sent; "" if no block is."""
        self._sent = {THOUGHTS: "", TEXT: ""}

    def progress(self, deltas: Sequence[TextDelta]) -> Iterator[Json]:
        """Yield events with the text that is certain before the turn is complete."""
        yield from self._more(THOUGHTS, "".join(delta.thoughts for delta in deltas))
        yield from self._more(TEXT, "".join(delta.text for delta in deltas))

    def rest(self, reply: ChatReply) -> Iterator[Json]:
        """Yield the other events of a complete turn.

        Raises ContradictionError if its message does not begin with what was sent.
        """
        message = reply.message
        check_begun(message, self._sent[THOUGHTS], self._sent[TEXT])
        yield from self._more(THOUGHTS, message.thoughts[len(self._sent[THOUGHTS]) :])
        yield from self._more(TEXT, message.content[len(self._sent[TEXT]) :])
        if not self._begun:
            yield from self._begin()
        yield from self._complete()
        for call in message.tool_calls:
            yield from self._call(self._blocks, call)
            self._blocks += 1
        yield from self._end(reply)

    def _more(self, kind: str, text: str) -> Iterator[Json]:
        """Yield events with more text of a block, after the events that must precede
        it.
        """
        if not text:
            return
        if not self._begun:
            self._begun = True
            yield from self._begin()
        if self._open != kind:
            yield from self._complete()
            self._open = kind
            yield from self._open_block(kind)
        self._sent[kind] += text
        yield from self._delta(kind, text)

    def _complete(self) -> Iterator[Json]:
        if self._open:
            yield from self._close_block(self._open, self._sent[self._open])
            self._blocks += 1
            self._open = ""

    @abstractmethod
    def _begin(self) -> Iterator[Json]:
        """Yield the events before the first block."""

    @abstractmethod
    def _open_block(self, kind: str) -> Iterator[Json]:
        """Yield the events at the beginning of block number `_blocks`."""

    @abstractmethod
    def _delta(self, kind: str, text: str) -> Iterator[Json]:
        """Yield events with more of the block."""

    @abstractmethod
    def _close_block(self, kind: str, text: str) -> Iterator[Json]:
        """Yield the events at the end of the block, whose whole text is `text`."""

    @abstractmethod
    def _call(self, index: int, call: ToolCall) -> Iterator[Json]:
        """Yield the events of a call, which is block `index`."""

    @abstractmethod
    def _end(self, reply: ChatReply) -> Iterator[Json]:
        """Yield the events after the last block."""


def typed_event(event: Json) -> bytes:
    """Return the bytes of an event, which is named after its type."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
