"""Records the conversations of an agent program in one session as token sequences for
training. Pure: no clock, no I/O.

The program sends complete conversations, as chat clients do. A conversation that
continues where a call of this session ended has a prompt that begins with all tokens of
that call, and only the new messages are rendered: it joins that call's sequence. Any
other conversation (a rewritten context, a sub-agent, a second call on the same prefix)
opens a new sequence, in which everything before its own output is prompt. In this
prompt, too, sampled tokens are kept wherever the program sends back a message that the
agent wrote in this session.

Thoughts follow the chat template: where the template leaves out the thoughts of earlier
turns, these turns are rendered again, and a new sequence begins. If a program sends
back a message of the agent without its thoughts, because its API has no place for them,
the thoughts are restored.

Invariants, where "sampled" means the tokens of calls whose answer the program has
received:
- every sampled token is an output of exactly one sequence, with its log-prob and weight
  version: nothing is trained on twice;
- a sequence only grows at its end, and each turn's prompt is exactly what precedes it;
- a request that is repeated because its answer did not arrive is the same call, and
  counts once. An answer that never arrives counts nowhere, since it had no effect.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from rollweave.rollout.chat.conversation import check_sampled
from rollweave.rollout.chat.replies import call_key
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.branches import Branch, Call, CallState, Conversation, origin
from rollweave.schema.chat import Message
from rollweave.schema.serving import GenerateResult
from rollweave.schema.work import (
    Origin,
    SequenceCause,
    TokenSequence,
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The prompt of a request: its `context`, the calls of this session whose sampled
    tokens are part of it, the digest of its conversation, the messages whose thoughts
    are `shown`, and the conversation (None for a completion).
    """

    context: tuple[int, ...]
    recognized: list[Call]
    digest: bytes
    shown: frozenset[int]
    conversation: Conversation | None


class SessionRecorder:
    """Records one session.

    A call begins, is answered (or dropped), and then is delivered (or lost, and perhaps
    requested again).
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._calls_by_key: dict[Hashable, list[Call]] = {}
        self._by_message: dict[Hashable, list[Call]] = {}
        """Answered calls by the agent's message."""
        self._by_digest: dict[bytes, list[Call]] = {}
        """Answered calls by the digest of the conversation with the agent's message."""
        self._by_stopped_text: dict[str, list[Call]] = {}
        """Answered calls by the text of their turn and the stop text that ended it."""
        self._by_text: dict[tuple[int, bytes], list[Call]] = {}
        """Answered completions by the length and the digest of prompt and answer."""
        self._branches: list[Branch] = []
        self.calls = 0
        """Number of requests that were not repetitions."""

    def begin(
        self,
        key: Hashable,
        messages: Sequence[Message],
        tools: Sequence[str] = (),
        *,
        prompt: str | tuple[int, ...] | None = None,
        repeated: bool = False,
        arguments: str = "",
        prepared: Prepared | None = None,
    ) -> Call:
        """Return the call of a request. Its state tells the caller what to do: it is
        `PENDING` if it is new or in progress.

        Requests with equal `key` are equal; a request whose answer was lost gets this
        answer, and a request that the program marks as `repeated` is the call that it
        repeats, if there is one. A completion has a `prompt`, text or tokens, instead
        of messages. `arguments` are the arguments of the chat template, as in
        `TextCodec.with_arguments`. `prepared` is the result of `prepare` for the same
        request. Raises ChatError if the chat template refuses the messages or its
        arguments.
        """
        call = self.repeated_call(key, repeated=repeated)
        if call is not None:
            if call.state is CallState.LOST:
                call.state = CallState.ANSWERED
            return call
        if prepared is None:
            prepared = self.prepare(messages, tools, prompt=prompt, arguments=arguments)
        context, recognized = prepared.context, prepared.recognized
        for known in recognized:
            self.deliver(known)  # the program sent the answer back, so it has it
        call = Call(
            number=self.calls,
            key=key,
            digest=prepared.digest,
            prompt=context,
            prompt_tokens=len(context),
            text=prompt if isinstance(prompt, str) else None,
            conversation=prepared.conversation,
            shown=prepared.shown,
            continues=recognized[-1] if recognized else None,
        )
        self.calls += 1
        self._calls_by_key.setdefault(key, []).append(call)
        return call

    def prepare(
        self,
        messages: Sequence[Message],
        tools: Sequence[str] = (),
        *,
        prompt: str | tuple[int, ...] | None = None,
        arguments: str = "",
    ) -> Prepared:
        """Return the prompt of a request, as `begin` needs it. Changes nothing, and may
        run on another thread meanwhile. Raises ChatError.
        """
        codec = self._codec.with_arguments(arguments)
        messages, digests = self._with_thoughts(messages, tools, arguments)
        shown = codec.shown_thoughts(messages)
        context, recognized = (
            self._context(codec, messages, tools, digests, shown)
            if prompt is None
            else self._text_context(prompt)
        )
        conversation = None
        if prompt is None:
            conversation = Conversation.of(messages, tools, arguments, shown)
        return Prepared(context, recognized, digests[-1], shown, conversation)

    def repeated_call(self, key: Hashable, *, repeated: bool) -> Call | None:
        """Return the call that a request repeats, as `begin` defines it, or None."""
        earlier = self._calls_by_key.get(key, [])
        lost = [call for call in earlier if call.state is CallState.LOST]
        return (lost or earlier)[-1] if lost or (repeated and earlier) else None

    def answer(
        self, call: Call, result: GenerateResult, message: Message, *, stopped: str = ""
    ) -> None:
        """Record the engine's answer, and the message that the program will receive.
        `stopped` is the message's text with the stop text that ended it, if a stop text
        did.

        Raises ValueError for an invalid result.
        """
        assert call.state is CallState.PENDING, f"a call is answered once, and was {call.state}"
        check_sampled(result)
        if any(span.version < 0 for span in result.versions):
            raise ValueError(
                f"versions must be those of published weights, 0 or more, got {result.versions}"
            )
        call.result, call.state = result, CallState.ANSWERED
        if call.text is not None:
            text = call.text + self._codec.decode(result.tokens)
            self._by_text.setdefault(_text_key(text), []).append(call)
            call.text = None
            return
        call.message, call.thoughts = message, message.thoughts
        call.call_ids = [tool_call.id for tool_call in message.tool_calls]
        spoken = [message]
        if message.thoughts and call.conversation is not None:
            call.shown |= {len(call.conversation.messages)}
            spoken.append(_without_thoughts(message))
        for known in spoken:
            self._by_message.setdefault(_message_key(known), []).append(call)
            self._by_digest.setdefault(_extend_digest(call.digest, known), []).append(call)
        if stopped and not message.tool_calls:
            self._by_stopped_text.setdefault(stopped.strip(), []).append(call)

    def drop(self, call: Call) -> None:
        """Discard a call that will not be answered, as if it had not been requested."""
        assert call.state is CallState.PENDING, (
            f"only a call that waits can be dropped, and it was {call.state}"
        )
        call.state = CallState.DROPPED
        others = self._calls_by_key[call.key]
        others.remove(call)
        if not others:
            del self._calls_by_key[call.key]

    def lose(self, call: Call) -> None:
        """Record that the answer did not reach the program, unless the program has
        already sent it back.
        """
        if call.state is CallState.ANSWERED:
            call.state = CallState.LOST

    def deliver(self, call: Call) -> None:
        """Record that the program has the answer, which counts from now on.
        Idempotent.
        """
        if call.state is CallState.DELIVERED:
            return
        assert call.result is not None, (
            f"only an answer can be delivered, and the call was {call.state}"
        )
        call.state = CallState.DELIVERED
        prefixes = [branch for branch in self._branches if branch.is_prefix_of(call)]
        if not prefixes:
            prefixes = [Branch(self._origin(call))]
            self._branches += prefixes
        branch = max(prefixes, key=lambda branch: len(branch.tokens))
        branch.append_call(call, call.result)
        call.end, call.branch = len(branch.tokens), branch
        if call.conversation is not None and call.message is not None:
            branch.conversation = call.conversation.with_answer(call.message)
        call.prompt = ()
        call.conversation, call.message, call.continues = None, None, None

    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return the training sequences, in the order in which they began."""
        return tuple(branch.sequence(branch.origin) for branch in self._branches)

    @property
    def undelivered_tokens(self) -> int:
        """Return the number of tokens that were sampled for answers that have not
        reached the program.
        """
        undelivered = (CallState.ANSWERED, CallState.LOST)
        calls = [
            call
            for calls in self._calls_by_key.values()
            for call in calls
            if call.state in undelivered
        ]
        return sum(len(call.result.tokens) for call in calls if call.result is not None)

    def _origin(self, call: Call) -> Origin:
        """Return why a call opens a sequence."""
        if call.conversation is not None:
            others = [branch.conversation for branch in self._branches]
            why = origin(call.conversation, others)
            return msgspec.structs.replace(why, arguments=call.conversation.arguments)
        if call.continues is not None and call.continues.branch is not None:
            of = self._branches.index(call.continues.branch)
            return Origin(cause=SequenceCause.BRANCH, of=of)
        new = SequenceCause.NEW_CONVERSATION if self._branches else SequenceCause.FIRST
        return Origin(cause=new)

    def _context(
        self,
        codec: TextCodec,
        messages: Sequence[Message],
        tools: Sequence[str],
        digests: Sequence[bytes],
        shown: frozenset[int],
    ) -> tuple[tuple[int, ...], list[Call]]:
        """Return the tokens of a conversation and of the opening of the next turn, and
        the recognized calls, whose sampled tokens are part of the conversation's
        tokens. The thoughts of the messages `shown` are included.
        """
        context: tuple[int, ...] = ()
        last: tuple[int, ...] = ()  # tokens of the agent's last message
        recognized: list[Call] = []
        since, begun = self._begun(digests, shown)
        if begun is not None:
            recognized.append(begun)
            context = begun.context
            last = begun.message_tokens
        messages = [
            message if place in shown else _without_thoughts(message)
            for place, message in enumerate(messages)
        ]
        for place, message in enumerate(messages):
            if message.role != "assistant" or place < max(since, 1):
                continue
            known, rest = self._known(message)
            if known:
                context = _render(context, codec, last, messages[since:place], tools)
                recognized.append(_preferred(known))
                last = recognized[-1].message_tokens
                last += self._codec.encode_literal(rest, after="\n") if rest else ()
                context += last
                since = place + 1
        return _render(context, codec, last, messages[since:], tools), recognized

    def _begun(self, digests: Sequence[bytes], shown: frozenset[int]) -> tuple[int, Call | None]:
        """Return the longest beginning of this conversation that is a call's
        conversation with its answer, whose tokens have the thoughts `shown`: the number
        of messages, and the call. Return 0 and None if there is no such call.
        """
        for place in range(len(digests) - 1, 0, -1):
            thought = frozenset(index for index in shown if index < place)
            known = [
                call for call in self._by_digest.get(digests[place], ()) if call.shown == thought
            ]
            if known:
                return place, _preferred(known)
        return 0, None

    def _with_thoughts(
        self, messages: Sequence[Message], tools: Sequence[str], arguments: str
    ) -> tuple[Sequence[Message], list[bytes]]:
        """Return the messages, with the thoughts of the agent's messages restored where
        the program has sent none; and the digests of the conversation's beginnings:
        `[place]` is the digest of the first `place` messages.
        """
        whole: list[Message] = []
        digests = [xxhash.xxh3_128_digest(repr((tuple(tools), arguments)).encode())]
        for message in messages:
            digest = _extend_digest(digests[-1], message)
            if message.role == "assistant" and not message.thoughts:
                known = self._by_digest.get(digest) or self._by_message.get(_message_key(message))
                if known and (thoughts := _preferred(known, message).thoughts):
                    message = msgspec.structs.replace(message, thoughts=thoughts)
                    digest = _extend_digest(digests[-1], message)
            whole.append(message)
            digests.append(digest)
        return whole, digests

    def _known(self, message: Message) -> tuple[list[Call], str]:
        """Return the calls with this message, and the text that the program has
        appended to it: a turn that ended with a stop text may go on in the history.
        """
        known = self._by_message.get(_message_key(message), ())
        if known := [call for call in known if call.thoughts.strip() == message.thoughts.strip()]:
            return known, ""
        text = message.content.strip()
        begun = [known for known in tuple(self._by_stopped_text) if text.startswith(known)]
        if not begun or message.tool_calls:
            return [], ""
        longest = max(begun, key=len)
        return self._by_stopped_text[longest], text[len(longest) :]

    def _text_context(self, prompt: str | tuple[int, ...]) -> tuple[tuple[int, ...], list[Call]]:
        """Return the tokens of a completion's prompt, and the earlier completion with
        which the prompt begins, whose tokens are part of it.
        """
        if not isinstance(prompt, str):
            return prompt, []
        for length in sorted({length for length, _ in tuple(self._by_text)}, reverse=True):
            known = self._by_text.get(_text_key(prompt[:length])) if length <= len(prompt) else None
            if known:
                call, rest = _preferred(known), prompt[length:]
                more = self._codec.encode_literal(rest, after="\n") if rest else ()
                return call.context + more, [call]
        return self._codec.encode_literal(prompt), []


def _render(
    context: tuple[int, ...],
    codec: TextCodec,
    last: tuple[int, ...],
    messages: Sequence[Message],
    tools: Sequence[str],
) -> tuple[int, ...]:
    """Return the context with the messages that follow the agent's `last` message, or
    begin the conversation.
    """
    rest = codec.extend(last, messages, tools=tools) if last else codec.start(messages, tools)
    return context + rest


def _message_key(message: Message) -> tuple[object, ...]:
    """Return a key that is equal for messages that programs send back as the same:
    white space around an answer and the ids of its calls do not count.
    """
    if message.role != "assistant":
        return (message.role, message.content, message.tool_call_id, message.name)
    said = (message.role, message.content.strip(), call_key(message.tool_calls))
    return (*said, message.thoughts.strip()) if message.thoughts else said


def _without_thoughts(message: Message) -> Message:
    return msgspec.structs.replace(message, thoughts="") if message.thoughts else message


def _text_key(text: str) -> tuple[int, bytes]:
    return len(text), xxhash.xxh3_128_digest(text.encode(errors="surrogatepass"))


def _extend_digest(digest: bytes, message: Message) -> bytes:
    return xxhash.xxh3_128_digest(digest + repr(_message_key(message)).encode())


def _preferred(calls: Sequence[Call], message: Message | None = None) -> Call:
    """Choose among calls with the same message: a call whose tool calls have the ids of
    `message`, else a delivered call, else the latest call.
    """
    ids = [call.id for call in message.tool_calls] if message is not None else []

    def rank(call: Call) -> tuple[bool, bool, int]:
        return call.call_ids == ids, call.state is CallState.DELIVERED, call.number

    return max(calls, key=rank)
