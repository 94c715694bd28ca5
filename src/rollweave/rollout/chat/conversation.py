"""One conversation: the tokens of the agent's context, and the facts that training
needs about them.

Invariants: `tokens` only grows at its end; sampled ids stand in it as the engine
returned them, with their log-probs and weight versions; turns and observations
alternate. Earlier tokens are never rewritten.
"""

import itertools
from collections.abc import Sequence

import msgspec

from rollweave.rollout.chat.codec import ChatCodec, ChatError
from rollweave.schema.chat import Message
from rollweave.schema.serving import (
    FinishReason,
    GenerateResult,
    VersionSpan,
    openai_finish_reason,
    spans_cover,
)
from rollweave.schema.work import (
    Origin,
    Routes,
    Segment,
    SegmentKind,
    TokenSequence,
    TurnSpan,
    with_routes,
)


class GrowingSequence:
    """A token sequence that grows at its end, by given tokens and sampled turns."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.turns: list[TurnSpan] = []
        self._logprobs: list[float] = []
        self._segments: list[Segment] = []
        self._routes: tuple[Routes, ...] = ()

    def append(
        self,
        tokens: Sequence[int],
        kind: SegmentKind,
        version: int = -1,
        logprobs: Sequence[float] | None = None,
    ) -> None:
        """Append tokens of one kind. Given tokens have no log-probs."""
        start = len(self.tokens)
        if tokens:
            self._segments.append(
                Segment(start=start, end=start + len(tokens), kind=kind, version=version)
            )
        self.tokens += tokens
        self._logprobs += logprobs if logprobs is not None else [0.0] * len(tokens)

    def append_turn(self, result: GenerateResult, *, state_key: str = "") -> None:
        """Append a turn that `check_sampled` has accepted, as the engine sampled it."""
        start = len(self.tokens)
        for span in result.versions:
            part = slice(span.start, span.end)
            tokens, logprobs = result.tokens[part], result.logprobs[part]
            self.append(tokens, SegmentKind.OUTPUT, span.version, logprobs)
        self._routes = with_routes(self._routes, result.routes)
        turn = TurnSpan(
            start=start,
            end=len(self.tokens),
            state_key=state_key,
            finish_reason=openai_finish_reason(result.finish),
        )
        self.turns.append(turn)

    def sequence(self, origin: Origin | None = None) -> TokenSequence:
        """Return the training sequence so far."""
        return TokenSequence(
            tokens=tuple(self.tokens),
            segments=tuple(self._segments),
            logprobs=tuple(self._logprobs),
            routes=self._routes,
            turns=tuple(self.turns),
            origin=origin,
        )


def check_sampled(result: GenerateResult) -> None:
    """Raise ValueError unless a turn has tokens, each with a log-prob, and its versions
    cover the tokens without gaps.
    """
    count = len(result.tokens)
    if not count or count != len(result.logprobs):
        raise ValueError(
            "a turn must have one logprob per token and at least one token, got "
            f"{len(result.logprobs)} for {count}"
        )
    if not spans_cover(result.versions, count):
        raise ValueError(
            f"versions must cover the {count} sampled tokens in order, got {result.versions}"
        )


class Conversation:
    """Begins with the environment's first messages; then `add_turn` and `observe`
    alternate.
    """

    def __init__(
        self, codec: ChatCodec, messages: Sequence[Message], *, state_key: str = ""
    ) -> None:
        """Render the first messages. Raises ChatError if the chat template refuses
        them.
        """
        self._codec, self._grown = codec, GrowingSequence()
        self._state_key = state_key
        self._messages = list(messages)
        self._grown.append(codec.start(messages), SegmentKind.PROMPT)
        self.prompt_tokens = len(self)

    def __len__(self) -> int:
        """Return the number of tokens so far."""
        return len(self._grown.tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the context for the next turn or, after the last turn, the complete
        conversation.
        """
        return tuple(self._grown.tokens)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the messages as text. The agent's are decoded from its tokens."""
        return tuple(self._messages)

    @property
    def turns(self) -> int:
        """Return the number of turns that the agent has taken."""
        return len(self._grown.turns)

    @property
    def finish_reason(self) -> str:
        """Return how the last turn ended: "stop", or "length" if a token limit cut
        it.
        """
        return self._grown.turns[-1].finish_reason

    def add_turn(self, result: GenerateResult) -> str:
        """Append the agent's turn as the engine sampled it, and return its text. Raises
        ValueError if the result is inconsistent.
        """
        if self._after_turn():
            raise ValueError("add_turn must be followed by observe, got add_turn twice")
        check_sampled(result)
        self._grown.append_turn(result, state_key=self._state_key)
        text, reason = self._codec.text(result.tokens), self.finish_reason
        cut = reason if reason != "stop" else ""
        self._messages.append(Message(role="assistant", content=text, finish_reason=cut))
        return text

    def reward(self, value: float) -> None:
        """Set the reward of the latest turn."""
        turns = self._grown.turns
        turns[-1] = msgspec.structs.replace(turns[-1], reward=value)

    def observe(
        self, messages: Sequence[Message], *, state_key: str = "", last: bool = False
    ) -> None:
        """Append the environment's answer and, unless it is the `last`, the opening of
        a turn. Raises ChatError.
        """
        if not self._after_turn():
            raise ValueError("observe must follow add_turn")
        if not messages:
            raise ChatError("a turn must be followed by at least one message, got none")
        turn = self._grown.turns[-1]
        sampled = self._grown.tokens[turn.start : turn.end]
        tokens = self._codec.extend(sampled, messages, prompt=not last)
        self._grown.append(tokens, SegmentKind.OBSERVATION)
        self._messages += messages
        self._state_key = state_key

    def sequence(self) -> TokenSequence:
        """Return the training sequence so far."""
        return self._grown.sequence()

    def _after_turn(self) -> bool:
        turns = self._grown.turns
        return bool(turns) and turns[-1].end == len(self)


def tokenize_transcript(codec: ChatCodec, messages: Sequence[Message]) -> TokenSequence:
    """Tokenize a scripted conversation in the same way as a rollout, for supervised
    warm-up. Log-probs and versions are 0.

    Raises ValueError if it does not begin with the environment, or has no turn of the
    agent; ChatError as `Conversation`.
    """
    runs = [
        (agent, list(run))
        for agent, run in itertools.groupby(messages, lambda message: message.role == "assistant")
    ]
    if len(runs) < 2 or runs[0][0] or any(agent and len(run) > 1 for agent, run in runs):
        roles = ", ".join(message.role for message in messages)
        raise ValueError(
            "a transcript must begin with the environment and have single turns of "
            f"the agent, got {roles}"
        )
    conversation = Conversation(codec, runs[0][1])
    for place, (agent, run) in enumerate(runs[1:], start=2):
        if agent:
            tokens = codec.encode_turn(run[0].content)
            sampled = GenerateResult(
                id="",
                tokens=tokens,
                logprobs=(0.0,) * len(tokens),
                versions=(VersionSpan(start=0, end=len(tokens), version=0),),
                finish=FinishReason.STOP,
            )
            conversation.add_turn(sampled)
        else:
            conversation.observe(run, last=place == len(runs))
    return conversation.sequence()
