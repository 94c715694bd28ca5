"""Explain why a call of a session began a new sequence instead of continuing an earlier
one. Pure.

A call is compared with the newest call of each sequence by messages, tools and template
arguments. Tokens decide whether a call continues a sequence (`recorder.py`); this
module only explains the decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollweave.rollout.chat.tools import call_key
from rollweave.schema.chat import Message
from rollweave.schema.work import Origin, SequenceCause

MOST_COMPARED: Final = 32
"""Maximum number of newest sequences with which a call is compared: a comparison takes
up to a millisecond.
"""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation up to some message: hashes of its messages and their roles, tools
    and template arguments. `thoughts` are the messages whose thoughts the agent was
    shown, or had.
    """

    messages: tuple[int, ...] = ()
    roles: tuple[str, ...] = ()
    tools: int = 0
    arguments: str = ""
    thoughts: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        messages: Sequence[Message],
        tools: Sequence[str],
        arguments: str,
        thoughts: frozenset[int] = frozenset(),
    ) -> "Conversation":
        return cls(
            thoughts=thoughts,
            messages=tuple(map(_hash, messages)),
            roles=tuple(message.role for message in messages),
            tools=hash(tuple(tools)),
            arguments=arguments,
        )

    def with_answer(self, message: Message) -> "Conversation":
        """Return the conversation with the agent's next message."""
        return Conversation(
            messages=(*self.messages, _hash(message)),
            roles=(*self.roles, message.role),
            tools=self.tools,
            arguments=self.arguments,
            thoughts=self.thoughts | ({len(self.messages)} if message.thoughts else set()),
        )


def origin(asked: Conversation, others: Sequence[Conversation]) -> Origin:
    """Return why `asked`, without its answer, continues none of the `others`. They are
    the newest conversations of the sequences so far, in order, with their answers.
    """
    if not others:
        return Origin(cause=SequenceCause.FIRST)
    first = max(0, len(others) - MOST_COMPARED)
    lengths = [_common(asked, other) for other in others[first:]]
    length, of = max((length, first + place) for place, length in enumerate(lengths))
    if not any(role != "system" for role in asked.roles[:length]):
        of = _shares_an_answer(asked, others, first)
        if of < 0:
            return Origin(cause=SequenceCause.NEW_CONVERSATION)
        length = _common(asked, others[of])
    other = others[of]
    if length in (len(asked.messages), len(other.messages)):
        cause = SequenceCause.BRANCH
        if asked.tools != other.tools:
            cause = SequenceCause.TOOLS_CHANGED
        elif asked.arguments != other.arguments:
            cause = SequenceCause.TEMPLATE_CHANGED
        elif any(place < length for place in other.thoughts - asked.thoughts):
            cause = SequenceCause.THOUGHTS_DROPPED
        return Origin(cause=cause, of=of)
    cause = _difference(asked, other, length)
    return Origin(cause=cause, of=of, message=length, role=asked.roles[length])


def _difference(asked: Conversation, other: Conversation, at: int) -> SequenceCause:
    """Return the cause if both have a message at `at`, and the messages differ."""
    if asked.messages[at] in other.messages[at + 1 :]:
        return SequenceCause.HISTORY_SHORTENED
    is_answer, was_answer = (each.roles[at] == "assistant" for each in (asked, other))
    if was_answer and not is_answer:
        return SequenceCause.HISTORY_SHORTENED
    if not is_answer and "assistant" not in asked.roles[at:] and "assistant" in asked.roles[:at]:
        return SequenceCause.BRANCH
    return SequenceCause.HISTORY_EDITED


def _shares_an_answer(asked: Conversation, others: Sequence[Conversation], first: int) -> int:
    """Return the index of the newest of the others with a message of the agent that
    `asked` also has; -1 if there is no such conversation.
    """
    answers = {
        message
        for message, role in zip(asked.messages, asked.roles, strict=True)
        if role == "assistant"
    }
    for place in range(len(others) - 1, first - 1, -1):
        if answers and not answers.isdisjoint(others[place].messages):
            return place
    return -1


def _common(one: Conversation, other: Conversation) -> int:
    """Return the number of messages with which both begin."""
    for place, (ours, theirs) in enumerate(zip(one.messages, other.messages, strict=False)):
        if ours != theirs:
            return place
    return min(len(one.messages), len(other.messages))


def _hash(message: Message) -> int:
    """Return a hash that is equal for messages that show the agent the same: the ids of
    calls, and white space around an answer, do not count.
    """
    if message.role == "assistant":
        key = (message.role, message.content.strip(), call_key(message.tool_calls))
        return hash((*key, message.thoughts.strip()) if message.thoughts else key)
    return hash((message.role, message.content, message.name))
