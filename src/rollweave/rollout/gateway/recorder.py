"""What an agent program said and was told in one session, as token sequences to train
on. Pure: no clock, no I/O.

The program sends whole conversations, as chat clients do. One that goes on where a call
of this session ended has a prompt that begins with all tokens of that call, and only
what is new is rendered: it joins that call's sequence. Any other (a rewritten context,
a sub-agent, a second call on the same prefix) opens a sequence of its own, to which
everything before its own output is prompt; there too, the sampled tokens stand wherever
the program sends back what the agent said in this session.

Invariants, with "sampled" meaning the tokens of calls whose answer the program has:
- every sampled token is an output of exactly one sequence, with its log-prob and weight
  version: nothing is trained on twice;
- a sequence only grows at its end, and each turn's prompt is exactly what stands before
  it;
- a request that is repeated because its answer did not arrive is the same call, and
  counts once. An answer that never arrives counts nowhere, since nothing came of it.
"""

import enum
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import xxhash

from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.tools import call_gist
from rollweave.schema.chat import Message
from rollweave.schema.serving import GenerateResult, finish_word
from rollweave.schema.work import Segment, SegmentKind, TokenSequence, TurnSpan


class CallState(enum.Enum):
    ASKED = "asked"  # being generated
    ANSWERED = "answered"  # on its way to the program
    LOST = "lost"  # the way broke; the same request gets the same answer
    DELIVERED = "delivered"  # the program has it: part of a sequence
    DROPPED = "dropped"  # never generated to its end


@dataclass(eq=False, slots=True)
class Call:
    """One request. `forced` are the last tokens of its prompt, put into the agent's
    mouth: part of its message.

    `path` is a digest of the conversation. Once the call is in a sequence, up to `end`,
    its `prompt` is empty: the prompts of a program add up to the square of its context.
    """

    number: int
    key: Hashable
    path: bytes
    prompt: tuple[int, ...]
    prompt_tokens: int
    forced: tuple[int, ...] = ()
    state: CallState = CallState.ASKED
    result: GenerateResult | None = None
    strand: "_Strand | None" = None
    end: int = 0

    @property
    def words(self) -> tuple[int, ...]:
        """The agent's message."""
        assert self.result is not None, "only an answered call has words"
        return self.forced + self.result.tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of the conversation, up to the end of the agent's message."""
        assert self.result is not None, "only an answered call has an end"
        return (
            tuple(self.strand.tokens[: self.end])
            if self.strand is not None
            else self.prompt + self.result.tokens
        )


@dataclass(eq=False, slots=True)
class _Strand:
    """A sequence that grows at its end."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    turns: list[TurnSpan] = field(default_factory=list)

    def begins(self, prompt: tuple[int, ...]) -> bool:
        return (
            len(self.tokens) <= len(prompt)
            and self.tokens[-1] == prompt[len(self.tokens) - 1]
            and (tuple(self.tokens) == prompt[: len(self.tokens)])
        )

    def take(self, prompt: tuple[int, ...], result: GenerateResult) -> None:
        kind = SegmentKind.OBSERVATION if self.tokens else SegmentKind.PROMPT
        given = prompt[len(self.tokens) :]
        self._append(given, [0.0] * len(given), kind)
        start = len(self.tokens)
        for span in result.versions:
            part = slice(span.start, span.end)
            self._append(
                result.tokens[part], result.logprobs[part], SegmentKind.OUTPUT, span.version
            )
        self.turns.append(
            TurnSpan(start=start, end=len(self.tokens), finish_reason=finish_word(result.finish))
        )

    def sequence(self) -> TokenSequence:
        return TokenSequence(
            tokens=tuple(self.tokens),
            segments=tuple(self.segments),
            logprobs=tuple(self.logprobs),
            turns=tuple(self.turns),
        )

    def _append(
        self, tokens: Sequence[int], logprobs: Sequence[float], kind: SegmentKind, version: int = -1
    ) -> None:
        if tokens:
            start = len(self.tokens)
            self.segments.append(
                Segment(start=start, end=start + len(tokens), kind=kind, version=version)
            )
            self.tokens += tokens
            self.logprobs += logprobs


class SessionRecorder:
    """One session.

    A call is asked, then answered (or dropped), then delivered (or lost, and perhaps
    asked again).
    """

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._asked: dict[Hashable, list[Call]] = {}
        self._said: dict[Hashable, list[Call]] = {}
        """Answered calls by what was said."""
        self._ended: dict[bytes, list[Call]] = {}
        """Answered calls by the path of the conversation with what was said."""
        self._strands: list[_Strand] = []
        self.calls = 0
        """Requests that were not repetitions."""

    def ask(
        self,
        key: Hashable,
        messages: Sequence[Message],
        tools: Sequence[str] = (),
        *,
        forced: str = "",
        repeated: bool = False,
    ) -> Call:
        """A request: the call that it is, whose state says what there is to do: `ASKED`
        and new, or already under way.

        Requests with equal `key` ask for the same; one whose answer was lost gets that
        answer, and one that the program says is `repeated` is the call that it repeats,
        if there is one. `forced` is how the agent's message has to begin. Raises
        ChatError where the chat template refuses the messages.
        """
        earlier = self._asked.get(key, [])
        repeats = [call for call in earlier if call.state is CallState.LOST]
        if repeats or (repeated and earlier):
            call = (repeats or earlier)[-1]
            if call.state is CallState.LOST:
                call.state = CallState.ANSWERED
            return call
        paths = _paths(messages, tools)
        context, recognised = self._context(messages, tools, paths)
        for known in recognised:
            self.deliver(known)  # the program has it, or it could not send it back
        opening = self._codec.literal(forced) if forced else ()
        call = Call(
            number=self.calls,
            key=key,
            path=paths[-1],
            prompt=context + opening,
            prompt_tokens=len(context) + len(opening),
            forced=opening,
        )
        self.calls += 1
        self._asked.setdefault(key, []).append(call)
        return call

    def answer(self, call: Call, result: GenerateResult, message: Message) -> None:
        """The engine's answer, and the message as which the program will see it.

        Raises ValueError for a wrong result.
        """
        assert call.state is CallState.ASKED, f"a call is answered once, and was {call.state}"
        _check(result)
        call.result, call.state = result, CallState.ANSWERED
        self._said.setdefault(_gist(message), []).append(call)
        self._ended.setdefault(_step(call.path, message), []).append(call)

    def drop(self, call: Call) -> None:
        """It will not be answered: as if it had not been asked."""
        assert call.state is CallState.ASKED, (
            f"only a call that waits can be dropped, and it was {call.state}"
        )
        call.state = CallState.DROPPED
        self._asked[call.key].remove(call)

    def lose(self, call: Call) -> None:
        """The answer did not reach the program, unless it already showed that it has
        it.
        """
        if call.state is CallState.ANSWERED:
            call.state = CallState.LOST

    def deliver(self, call: Call) -> None:
        """The program has the answer: it counts from now on. Harmless when repeated."""
        if call.state is CallState.DELIVERED:
            return
        assert call.result is not None, (
            f"only an answer can be delivered, and the call was {call.state}"
        )
        call.state = CallState.DELIVERED
        begun = [strand for strand in self._strands if strand.begins(call.prompt)]
        if not begun:
            begun = [_Strand()]
            self._strands += begun
        call.strand = max(begun, key=lambda strand: len(strand.tokens))
        call.strand.take(call.prompt, call.result)
        call.end = len(call.strand.tokens)
        call.prompt = ()

    def sequences(self) -> tuple[TokenSequence, ...]:
        """What there is to train on, in the order in which the sequences began."""
        return tuple(strand.sequence() for strand in self._strands)

    @property
    def undelivered_tokens(self) -> int:
        """Tokens that were sampled for answers that have not reached the program."""
        late = (CallState.ANSWERED, CallState.LOST)
        calls = [call for calls in self._asked.values() for call in calls if call.state in late]
        return sum(len(call.result.tokens) for call in calls if call.result is not None)

    def _context(
        self, messages: Sequence[Message], tools: Sequence[str], paths: Sequence[bytes]
    ) -> tuple[tuple[int, ...], list[Call]]:
        """The tokens of a conversation and of the opening of the next turn, and the
        calls whose words were put in.
        """
        tokens: list[int] = []
        recognised: list[Call] = []
        since = next(
            (place for place in range(len(messages), 0, -1) if paths[place] in self._ended), 0
        )
        if since:
            recognised.append(_best(self._ended[paths[since]]))
            tokens += recognised[-1].tokens
        for place, message in enumerate(messages):
            known = (
                self._said.get(_gist(message))
                if message.role == "assistant" and place >= max(since, 1)
                else None
            )
            if known:
                tokens += self._between(recognised, messages[since:place], tools)
                recognised.append(_best(known))
                tokens += recognised[-1].words
                since = place + 1
        tokens += self._between(recognised, messages[since:], tools)
        return tuple(tokens), recognised

    def _between(
        self, said: Sequence[Call], messages: Sequence[Message], tools: Sequence[str]
    ) -> tuple[int, ...]:
        """The tokens of messages that follow the last of the calls, or begin the
        conversation.
        """
        return (
            self._codec.extend(said[-1].words, messages)
            if said
            else self._codec.start(messages, tools)
        )


def _gist(message: Message) -> tuple[object, ...]:
    """Equal for what programs send back as the same: white space around an answer and
    the ids of its calls do not count.
    """
    if message.role != "assistant":
        return (message.role, message.content, message.tool_call_id, message.name)
    return (message.role, message.content.strip(), call_gist(message.tool_calls))


def _step(path: bytes, message: Message) -> bytes:
    return xxhash.xxh3_128_digest(path + repr(_gist(message)).encode())


def _paths(messages: Sequence[Message], tools: Sequence[str]) -> list[bytes]:
    """Digests of the conversation's beginnings: `[place]` is that of the first `place`
    messages.
    """
    return list(itertools.accumulate(messages, _step, initial=repr(tuple(tools)).encode()))


def _best(calls: Sequence[Call]) -> Call:
    """Of calls that said the same: one that was delivered; else the latest."""
    return max(calls, key=lambda call: (call.state is CallState.DELIVERED, call.number))


def _check(result: GenerateResult) -> None:
    if result.text_only:
        raise ValueError("a result must have the tokens that an engine sampled, got its text alone")
    count = len(result.tokens)
    if not count or len(result.logprobs) != count:
        raise ValueError(
            "a result must have one logprob a token and at least one, got "
            f"{len(result.logprobs)} for {count}"
        )
    ends = [0, *(span.end for span in result.versions)]
    starts = [span.start for span in result.versions]
    if starts != ends[:-1] or ends[-1] != count or ends != sorted(set(ends)):
        raise ValueError(f"versions must cover the {count} tokens in order, got {result.versions}")
    if any(span.version < 0 for span in result.versions):
        raise ValueError(
            f"versions must be those of published weights, 0 or more, got {result.versions}"
        )
