"""One conversation: the tokens of the agent's context, and the facts that training
needs about them.

Invariants: `tokens` only grows at its end; sampled ids stand in it as the engine
returned them, with their log-probs and weight versions; turns and observations
alternate. Earlier tokens are never rewritten.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rollweave.rollout.chat.codec import ChatCodec, ChatError
from rollweave.schema.chat import Message
from rollweave.schema.serving import VersionSpan, spans_cover
from rollweave.schema.work import (
    Routes,
    Segment,
    SegmentKind,
    TokenSequence,
    TurnSpan,
    with_routes,
)


@dataclass(slots=True)
class _Turn:
    start: int
    end: int
    state_key: str
    reward: float = 0.0
    finish_reason: str = "stop"


PLAN_TOKENS = 64
"""Number of tokens of the first turn that represent the agent's plan."""


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
        self._codec = codec
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._segments: list[Segment] = []
        self._turns: list[_Turn] = []
        self._routes: tuple[Routes, ...] = ()
        self._state_key = state_key
        self._messages = list(messages)
        self._append(codec.start(messages), SegmentKind.PROMPT)
        self.prompt_tokens = len(self._tokens)

    def __len__(self) -> int:
        """Return the number of tokens so far."""
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the context for the next turn or, after the last turn, the complete
        conversation.
        """
        return tuple(self._tokens)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the messages as text. The agent's are decoded from its tokens."""
        return tuple(self._messages)

    @property
    def turns(self) -> int:
        """Return the number of turns that the agent has taken."""
        return len(self._turns)

    @property
    def finish_reason(self) -> str:
        """Return how the last turn ended: "stop", or "length" if a token limit cut
        it.
        """
        return self._turns[-1].finish_reason

    @property
    def plan(self) -> tuple[int, ...]:
        """Return the first tokens of the agent's first turn, which represent its
        plan.
        """
        if not self._turns:
            return ()
        turn = self._turns[0]
        return tuple(self._tokens[turn.start : min(turn.end, turn.start + PLAN_TOKENS)])

    def add_turn(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[VersionSpan],
        *,
        finish_reason: str = "stop",
        routes: Routes | None = None,
    ) -> str:
        """Append the agent's turn as the engine sampled it, and return its text.

        `versions` must cover the tokens without gaps. Raises ValueError if the result
        is inconsistent.
        """
        if self._after_turn():
            raise ValueError("add_turn must be followed by observe, got add_turn twice")
        if not tokens or len(tokens) != len(logprobs):
            raise ValueError(
                "a turn must have one logprob per token and at least one token, got "
                f"{len(logprobs)} for {len(tokens)}"
            )
        if not spans_cover(versions, len(tokens)):
            raise ValueError(
                f"versions must cover the {len(tokens)} sampled tokens in order, got {versions}"
            )
        start = len(self._tokens)
        for span in versions:
            self._append(
                tokens[span.start : span.end],
                SegmentKind.OUTPUT,
                span.version,
                logprobs[span.start : span.end],
            )
        self._routes = with_routes(self._routes, routes)
        self._turns.append(
            _Turn(start, len(self._tokens), self._state_key, finish_reason=finish_reason)
        )
        text = self._codec.text(tokens)
        cut = finish_reason if finish_reason != "stop" else ""
        self._messages.append(Message(role="assistant", content=text, finish_reason=cut))
        return text

    def reward(self, value: float) -> None:
        """Set the reward of the latest turn."""
        self._turns[-1].reward = value

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
        turn = self._turns[-1]
        tokens = self._codec.extend(self._tokens[turn.start : turn.end], messages, prompt=not last)
        self._append(tokens, SegmentKind.OBSERVATION)
        self._messages += messages
        self._state_key = state_key

    def sequence(self) -> TokenSequence:
        """Return the training sequence so far."""
        return TokenSequence(
            tokens=tuple(self._tokens),
            segments=tuple(self._segments),
            logprobs=tuple(self._logprobs),
            routes=self._routes,
            turns=tuple(
                TurnSpan(
                    start=turn.start,
                    end=turn.end,
                    reward=turn.reward,
                    state_key=turn.state_key,
                    finish_reason=turn.finish_reason,
                )
                for turn in self._turns
            ),
        )

    def _after_turn(self) -> bool:
        return bool(self._turns) and self._turns[-1].end == len(self._tokens)

    def _append(
        self,
        tokens: Sequence[int],
        kind: SegmentKind,
        version: int = -1,
        logprobs: Sequence[float] | None = None,
    ) -> None:
        start = len(self._tokens)
        if tokens:
            self._segments.append(
                Segment(start=start, end=start + len(tokens), kind=kind, version=version)
            )
        self._tokens += tokens
        self._logprobs += logprobs if logprobs is not None else [0.0] * len(tokens)


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
            conversation.add_turn(
                tokens, [0.0] * len(tokens), [VersionSpan(start=0, end=len(tokens), version=0)]
            )
        else:
            conversation.observe(run, last=place == len(runs))
    return conversation.sequence()
