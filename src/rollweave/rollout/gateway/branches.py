"""The calls of a session, the branches of its conversations, and the reason why a call
began a new branch instead of continuing an earlier one. Pure.

A call is compared with the newest call of each branch by messages, tools and template
arguments. Tokens decide whether a call continues a branch (`recorder.py`); `origin`
only explains the decision.
"""

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rollweave.rollout.chat.conversation import GrowingSequence
from rollweave.rollout.chat.replies import call_key
from rollweave.schema.chat import Message
from rollweave.schema.serving import GenerateResult
from rollweave.schema.work import Origin, SegmentKind, SequenceCause

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


class CallState(enum.Enum):
    PENDING = "pending"  # being generated
    ANSWERED = "answered"  # being sent to the program
    LOST = "lost"  # the connection broke; the same request gets the same answer
    DELIVERED = "delivered"  # received by the program: part of a sequence
    DROPPED = "dropped"  # never completed


@dataclass(eq=False, slots=True)
class Call:
    """One request.

    `digest` is the digest of the conversation; a completion has the `text` of its
    prompt instead, until it is answered. Once the call is in a sequence, up to `end`,
    its `prompt` is empty: the prompts of a program add up to the square of its context.
    """

    number: int
    key: Hashable
    digest: bytes
    prompt: tuple[int, ...]
    prompt_tokens: int
    text: str | None = None
    conversation: Conversation | None = None
    """Its conversation until it is in a sequence; None for a completion."""
    message: Message | None = None
    """Its answer until it is in a sequence; None for a completion."""
    thoughts: str = ""
    """The thoughts of its answer."""
    call_ids: list[str] = field(default_factory=list)
    """The ids of the tool calls in its answer."""
    shown: frozenset[int] = frozenset()
    """The messages (of its conversation, or its answer) whose thoughts are among its
    tokens.
    """
    continues: "Call | None" = None
    """The call with which its prompt begins, until it is in a sequence."""
    state: CallState = CallState.PENDING
    result: GenerateResult | None = None
    branch: "Branch | None" = None
    end: int = 0

    @property
    def message_tokens(self) -> tuple[int, ...]:
        """Return the tokens of the agent's message."""
        assert self.result is not None, "only an answered call has a message"
        return self.result.tokens

    @property
    def context(self) -> tuple[int, ...]:
        """Return all tokens of the conversation, up to the end of the agent's
        message.
        """
        assert self.result is not None, "only an answered call has an end"
        prompt = self.prompt  # before `branch`, which another thread sets before it empties it
        if self.branch is None:
            return prompt + self.result.tokens
        return tuple(self.branch.tokens[: self.end])


class Branch(GrowingSequence):
    """A branch of the session's conversations, which began for the reason `origin`.
    `conversation` is the newest call's conversation, with its answer.
    """

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self.origin, self.conversation = origin, Conversation()

    def is_prefix_of(self, call: Call) -> bool:
        """Return whether the call's prompt begins with all tokens of this branch."""
        prompt = call.prompt
        return (
            len(self.tokens) <= len(prompt)
            and self.tokens[-1] == prompt[len(self.tokens) - 1]
            and (tuple(self.tokens) == prompt[: len(self.tokens)])
        )

    def append_call(self, call: Call, result: GenerateResult) -> None:
        """Append the rest of the call's prompt, and its answer."""
        kind = SegmentKind.OBSERVATION if self.tokens else SegmentKind.PROMPT
        self.append(call.prompt[len(self.tokens) :], kind)
        self.append_turn(result)


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
