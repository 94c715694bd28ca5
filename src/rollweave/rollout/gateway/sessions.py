"""The open sessions of a gateway: their access control, their turns in progress, and
their recordings.

Invariants: a session is accessible with its own token only; calls, sampled tokens and
concurrent turns are bounded; a turn is generated while at least one client waits for
it, and cancelled when the last client has gone; a closed session generates nothing.
"""

import asyncio
import bisect
import contextlib
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from rollweave.rollout.chat.replies import Thinking, ToolFormat
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.branches import Call, CallState
from rollweave.rollout.gateway.deltas import DeltaReader
from rollweave.rollout.gateway.fields import RequestError, TooLongError, Unread
from rollweave.rollout.gateway.preparing import (
    INLINE,
    Aside,
    IgnoredFields,
    Line,
    constraint_of,
    readable,
    template_errors,
    unconstrainable,
)
from rollweave.rollout.gateway.recorder import Prepared, SessionRecorder
from rollweave.rollout.gateway.requests import PINNED_FIELDS, ChatRequest
from rollweave.rollout.gateway.responses import read_turn
from rollweave.schema.base import Struct, mix
from rollweave.schema.chat import Message
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import (
    Constraint,
    FinishReason,
    GenerateResult,
    Sampling,
    TokenChances,
    TokenDelta,
)
from rollweave.schema.work import StopReason, Unreadable

T = TypeVar("T")

Generate = Callable[..., Awaitable[GenerateResult]]
"""`generate(session, tokens, sampling, on_tokens)` samples the agent's turn.

If the client reads the turn while it is sampled, `on_tokens` may be called with its
tokens delta by delta; a delta that starts at 0 begins the turn again. Raises
EngineError if that fails; may be cancelled.
"""


MAX_CHARS_PER_TOKEN = 16
"""Maximum characters of messages and tools for each token of the context; larger
requests are refused before they are tokenized, which takes a second per megabyte.
"""

MESSAGE_CHARS: Final = 64
"""Characters of a rendering that take as long as a message without text."""


class SessionLimits(Struct, frozen=True, kw_only=True):
    """Bounds of one session.

    `context` is the maximum number of tokens of prompt and turn together, `tokens` that
    of all turns' output.
    """

    calls: int = 1000
    concurrent: int = 16
    tokens: int = 1_000_000
    context: int = 32_768
    turn_tokens: int = 8192
    turn_s: float = 1800.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"limits.{name} must be positive, got {getattr(self, name)}")


@dataclass(eq=False, slots=True)
class Turn:
    """A call on its way from the engine to the client.

    `task` raises nothing but CancelledError: failures are in `error`.
    """

    call: Call
    waiters: int = 0
    task: asyncio.Task[None] | None = None
    error: RequestError | None = None
    message: Message | None = None
    shown: int = 0
    """Number of characters of the sampled text that the message contains."""
    tokens: list[int] = field(default_factory=list)
    """The tokens so far, if they are streamed: no more tokens than the session allows
    in a turn, however slowly clients read.
    """
    logprobs: list[float] = field(default_factory=list)
    tops: list[TokenChances] = field(default_factory=list)
    """The alternatives that are reported for each of the `tokens`, if any are."""
    news: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done once there are more tokens; replaced then."""

    @property
    def ended(self) -> bool:
        """True once the turn has a result or an error."""
        return self.task is not None and self.task.done()

    def on_tokens(self, delta: TokenDelta) -> None:
        """Append the tokens that the engine has reported, or begin again with them.
        Tokens that fit neither come with the result.
        """
        if delta.start == 0:
            self.tokens.clear()
            self.logprobs.clear()
            self.tops.clear()
        if delta.start != len(self.tokens) or len(delta.tokens) != len(delta.logprobs):
            return
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.tops += delta.top_logprobs
        news, self.news = self.news, asyncio.get_running_loop().create_future()
        news.set_result(None)


def new_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_urlsafe(32)


class Session:
    """The conversations of one agent program.

    `sampling` holds the defaults of a request; if `pinned` it always applies. `aside`
    does large work outside the event loop. `unconstrained` is the reason why the
    engines cannot constrain answers; "" if they can. `unreadable` says whether fields
    that neither the model nor its template can read are ignored, and recorded in
    `ignored`, or refused. `call_prefix` begins the ids of tool calls, which are unique
    within the session.
    """

    def __init__(
        self,
        id: str,
        *,
        codec: TextCodec,
        tools: ToolFormat | None,
        generate: Generate,
        limits: SessionLimits,
        sampling: Sampling,
        pinned: bool,
        aside: Aside,
        unconstrained: str = "",
        unreadable: Unreadable = "ignore",
        call_prefix: str = "",
        token: str = "",
    ) -> None:
        self._call_prefix = call_prefix
        self.id, self.limits = id, limits
        self.unreadable: Unreadable = unreadable
        self.ignored = IgnoredFields()
        self._unconstrained = unconstrained
        self._line = Line(aside)
        self.exhausted: StopReason | None = None
        """The limit by which the last turn was refused, if waiting does not help."""
        self.context_error = ""
        """The error of the last prompt that did not fit into the context."""
        self.token = token or new_token()
        self.recorder = SessionRecorder(codec)
        self.conversation: tuple[Message, ...] = ()
        """The messages of the last answered request, and its answer."""
        self.tools: tuple[str, ...] = ()
        """The declarations of the tools that the agent was shown with them."""
        self.closed = False
        self._codec, self._tools, self._generate = codec, tools, generate
        self._sampling, self._pinned = sampling, pinned
        self._turns: dict[Call, Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampled_tokens = 0

    @property
    def calls(self) -> int:
        """Return the number of turns requested, except abandoned ones."""
        return len(self._turns)

    def accepts_token(self, token: str) -> bool:
        """Return whether this is the session's token."""
        return hmac.compare_digest(token.encode(errors="surrogateescape"), self.token.encode())

    def readable(self, chat: ChatRequest) -> tuple[ChatRequest, list[Unread]]:
        """Return the request in the form that the agent can be shown, and the fields
        that were left out. Raises RequestError.
        """
        return readable(chat, self._codec, unreadable=self.unreadable)

    def prompt_of(self, chat: ChatRequest) -> tuple[int, ...]:
        """Return the tokens of a request's prompt. Raises RequestError."""
        self.check(chat)
        with template_errors(chat.source):
            return self.recorder.prepare(
                chat.messages, chat.tools, arguments=chat.template_arguments
            ).context

    @contextlib.asynccontextmanager
    async def turn(
        self, chat: ChatRequest, key: Hashable, *, repeated: bool
    ) -> AsyncIterator[Turn]:
        """Provide the requested turn while at least one client waits for it. Raises
        RequestError.

        The caller calls `deliver` once the client has the answer; otherwise the answer
        is lost.
        """
        self._check_new(chat, key, repeated)
        constraint = await constraint_of(
            chat, self._codec, self._tools, self._line, unconstrained=self._unconstrained
        )
        prepared = await self._prepare(chat)
        turn = self._turn(chat, key, repeated, prepared, constraint)
        turn.waiters += 1
        try:
            yield turn
        finally:
            turn.waiters -= 1
            if not turn.waiters:
                self._cancel(turn)
                self.recorder.lose(turn.call)

    async def beside(self, work: Callable[[], T], *, size: int, most: int = INLINE) -> T:
        """Return the result of work for a request, as `Line.run`."""
        return await self._line.run(work, size=size, most=most)

    def codec_of(self, chat: ChatRequest) -> TextCodec:
        """Return the codec of the request's text: a completion is not templated."""
        codec = self._codec.plain
        if chat.source != "prompt":
            codec = self._codec.with_arguments(chat.template_arguments)
        # The marks of calls and of thoughts may be special tokens.
        shows_special = chat.reads_calls or (chat.divides and codec.thinking is not None)
        return codec.without_special() if chat.hides_special and not shows_special else codec

    def deltas_of(self, turn: Turn, chat: ChatRequest) -> DeltaReader:
        """Return a reader of the turn's text while it is sampled."""
        call_start = None
        if self._tools is not None and chat.reads_calls:
            call_start = self._tools.call_start
        return DeltaReader(
            self.codec_of(chat),
            stop=self._stop_texts(chat),
            stop_tokens=chat.stop_token_ids,
            call_start=call_start,
            logprobs=chat.logprobs,
            thinking=self._thinking_of(chat),
        )

    def _thinking_of(self, chat: ChatRequest) -> Thinking | None:
        """Return the marks by which the turn's thoughts are divided from its text. An
        answer whose form is constrained has no marks: the constraint holds from its
        first token.
        """
        if not chat.divides or chat.constraint is not None or chat.call is not None:
            return None
        return self.codec_of(chat).thinking

    def thought_tokens(self, chat: ChatRequest, result: GenerateResult) -> int:
        """Return how many of the sampled tokens are thoughts and their marks."""
        thinking = self._thinking_of(chat)
        if thinking is None:
            return 0
        codec, tokens = self.codec_of(chat), result.tokens
        place = thinking.divide(codec.text(tokens))
        if not place.end and not place.answer:
            return 0
        # the fewest tokens whose text reaches the answer
        return bisect.bisect_left(
            range(len(tokens)), place.answer, key=lambda count: len(codec.decode(tokens[:count]))
        )

    def deliver(self, turn: Turn) -> None:
        """Record that the client has the answer."""
        self.recorder.deliver(turn.call)

    def close(self) -> None:
        """Cancel the turns in progress; their clients receive an error."""
        self.closed = True
        for turn in list(self._turns.values()):
            self._cancel(turn)

    async def wait_closed(self) -> None:
        """Close the session, and wait until no turn is in progress."""
        self.close()
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _check_new(self, chat: ChatRequest, key: Hashable, repeated: bool) -> None:
        """Raise RequestError for a request that is refused before it is prepared."""
        self._check_open()
        self.check(chat)
        if self.recorder.repeated_call(key, repeated=repeated) is None:
            self._check_concurrency()
            if self.exhausted is not None:  # the first refusal still reads the history
                self._check_quota()

    def _check_open(self) -> None:
        if self.closed:
            raise RequestError(
                404,
                f"session must be open, got {self.id!r:.80}, which is closed",
                code="session_not_found",
            )

    async def _prepare(self, chat: ChatRequest) -> Prepared:
        """Return the prompt of a request. A large prompt is made outside the event
        loop. Raises RequestError.
        """
        with template_errors(chat.source):
            return await self.beside(
                lambda: self.recorder.prepare(
                    chat.messages,
                    chat.tools,
                    prompt=chat.prompt,
                    arguments=chat.template_arguments,
                ),
                size=chat.chars + MESSAGE_CHARS * len(chat.messages),
            )

    def _turn(
        self,
        chat: ChatRequest,
        key: Hashable,
        repeated: bool,
        prepared: Prepared,
        constraint: Constraint | None,
    ) -> Turn:
        """Return the requested turn, which begins if it is new."""
        self._check_open()
        if self.recorder.repeated_call(key, repeated=repeated) is None:
            self._check_concurrency()
        call = self.recorder.begin(
            key,
            chat.messages,
            chat.tools,
            prompt=chat.prompt,
            repeated=repeated,
            arguments=chat.template_arguments,
            prepared=prepared,
        )
        turn = self._turns.get(call)
        if turn is None:
            turn = Turn(call)
            try:
                sampling = self._admit(chat, call, constraint)
            except RequestError:
                self.recorder.drop(call)
                raise
            self._turns[call] = turn
            turn.task = asyncio.create_task(
                self._take_turn(turn, chat, sampling), name=f"{self.id}-{call.number}"
            )
            self._tasks.add(turn.task)
            turn.task.add_done_callback(self._tasks.discard)
        return turn

    def check(self, chat: ChatRequest) -> None:
        """Raise RequestError for a request that the agent cannot be shown."""
        self._check_size(chat)
        with template_errors("chat_template_kwargs"):
            self.codec_of(chat)
        if chat.tools:
            self._check_tools(chat)

    def _check_size(self, chat: ChatRequest) -> None:
        """Raise RequestError for a text that is too long to be tokenized."""
        chars = chat.chars
        limit = MAX_CHARS_PER_TOKEN * self.limits.context
        if chars > limit:
            context = f"a context of {self.limits.context} tokens"
            raise self._too_long(
                chat.source,
                f"{chat.source} and tools must have at most {limit} characters in {context}, "
                f"got {chars}",
                tokens=chars // MAX_CHARS_PER_TOKEN,
            )

    def _check_tools(self, chat: ChatRequest) -> None:
        if not self.codec_of(chat).shows_tools:
            raise RequestError(
                400, "tools must be none: this model's chat template shows none", param="tools"
            )
        if chat.call is not None and self._tools is None:
            raise RequestError(
                400,
                "tool_choice must be auto or none: the format of this model's calls is unknown",
                param="tool_choice",
            )

    def _check_concurrency(self) -> None:
        running = sum(
            turn.task is not None and not turn.task.done() for turn in self._turns.values()
        )
        if running >= self.limits.concurrent:
            raise RequestError(
                429,
                f"concurrent calls must be at most {self.limits.concurrent}",
                code="rate_limit_exceeded",
            )

    def _check_quota(self) -> None:
        limits = self.limits
        if len(self._turns) >= limits.calls:
            self.exhausted = StopReason.MAX_TURNS
            raise RequestError(
                429, f"calls of a session must be at most {limits.calls}", code="insufficient_quota"
            )
        if self._sampled_tokens >= limits.tokens:
            self.exhausted = StopReason.MAX_TOKENS
            raise RequestError(
                429,
                f"tokens sampled in a session must be at most {limits.tokens}",
                code="insufficient_quota",
            )

    def _admit(self, chat: ChatRequest, call: Call, constraint: Constraint | None) -> Sampling:
        """Return how to sample the call. Raises RequestError if a limit is exceeded."""
        limits = self.limits
        self._check_quota()
        used = len(call.prompt)
        room = limits.context - used
        if room < 1:
            raise self._too_long(
                chat.source,
                f"{chat.source} must leave room in a context of {limits.context} tokens, got "
                f"{used} tokens",
                tokens=used,
            )
        self.exhausted = None
        room = min(room, limits.turn_tokens, limits.tokens - self._sampled_tokens)
        return self._sampling_of(chat, call, room, constraint)

    def _too_long(self, source: str, text: str, *, tokens: int) -> RequestError:
        """Return the error for a prompt that does not fit into the context."""
        self.exhausted, self.context_error = StopReason.MAX_TOKENS, text
        return TooLongError(text, param=source, tokens=tokens, limit=self.limits.context)

    def _sampling_of(
        self, chat: ChatRequest, call: Call, room: int, constraint: Constraint | None
    ) -> Sampling:
        base, codec = self._sampling, self.codec_of(chat)
        goes_on = chat.adjustments is not None and chat.adjustments.ignores_eos
        ends, end_texts = ((), ()) if goes_on else (codec.stop_token_ids, codec.stop)
        one_call = (
            (self._tools.call_end,)
            if self._tools is not None and chat.reads_calls and chat.one_call
            else ()
        )
        overrides = (
            {}
            if self._pinned
            else {
                name: value for name in PINNED_FIELDS if (value := getattr(chat, name)) is not None
            }
        )
        return msgspec.structs.replace(
            base,
            max_tokens=min(room, chat.max_tokens or room),
            stop_token_ids=tuple(
                dict.fromkeys((*ends, *base.stop_token_ids, *chat.stop_token_ids))
            ),
            stop=(*end_texts, *base.stop, *chat.stop, *one_call),
            allowed=chat.allowed or base.allowed,
            adjustments=chat.adjustments,
            constraint=constraint,
            # Two calls of the same prompt are two samples, and the same two samples
            # whenever the session is repeated.
            **{"seed": mix(base.seed, call.number), **overrides},
        )

    async def _take_turn(self, turn: Turn, chat: ChatRequest, sampling: Sampling) -> None:
        try:
            async with asyncio.timeout(self.limits.turn_s):
                on_tokens = turn.on_tokens if chat.stream else None
                result = await self._generate(self.id, turn.call.prompt, sampling, on_tokens)
            if result.finish is FinishReason.REFUSED:
                constraint = sampling.constraint
                assert constraint is not None, "only a constraint is refused"
                field = chat.constraint_field if chat.constraint is not None else "tools"
                raise unconstrainable(field, constraint, result.error)
            turn.error = turn.error or _result_error(result)
            if turn.error is None:
                self._accept_result(turn, chat, result)
        except TimeoutError:
            turn.error = RequestError(
                504, f"the turn took more than {self.limits.turn_s:g} s", code="timeout"
            )
        except RequestError as error:
            turn.error = error
        except EngineError as error:
            turn.error = RequestError(
                503, f"no engine could take the turn: {error}", code="unavailable"
            )
        except Exception as error:
            turn.error = RequestError(
                500, f"{type(error).__name__}: {error}", code="internal_error"
            )
        except asyncio.CancelledError:
            turn.error = turn.error or RequestError(503, "the turn was cancelled", code="cancelled")
            raise
        finally:
            self._forget(turn)

    def _accept_result(self, turn: Turn, chat: ChatRequest, result: GenerateResult) -> None:
        tools = self._tools if chat.reads_calls else None
        turn.message, turn.shown = read_turn(
            self.codec_of(chat),
            tools,
            result,
            number=f"{self._call_prefix}{turn.call.number:05d}",
            stop=self._stop_texts(chat),
            stop_tokens=chat.stop_token_ids,
            shows_stop=chat.shows_stop,
            thinking=self._thinking_of(chat),
        )
        codec = self.codec_of(chat)
        text = "" if codec.end_overlap(result.tokens) else codec.text(result.tokens)
        stops = (*self._sampling.stop, *chat.stop)
        end = next((stop for stop in stops if text.startswith(stop, turn.shown)), "")
        stopped = text[: turn.shown] + end if end else ""
        self.recorder.answer(turn.call, result, turn.message, stopped=stopped)
        asked = chat.messages
        if isinstance(chat.prompt, str):
            asked = (Message(role="user", content=chat.prompt),)
        self.conversation, self.tools = (*asked, turn.message), chat.tools
        self._sampled_tokens += len(result.tokens)

    def _stop_texts(self, chat: ChatRequest) -> tuple[str, ...]:
        """Return the texts that end a turn and are not shown."""
        return (*self.codec_of(chat).stop, *self._sampling.stop, *chat.stop)

    def _cancel(self, turn: Turn) -> None:
        """Cancel a turn in progress; it then counts as never requested."""
        if turn.task is not None and not turn.task.done():
            turn.error = RequestError(503, "the turn was cancelled", code="cancelled")
            turn.task.cancel()
            self._forget(turn)

    def _forget(self, turn: Turn) -> None:
        """Remove a turn without an answer."""
        if turn.call.state is CallState.PENDING:
            self.recorder.drop(turn.call)
            del self._turns[turn.call]


def _result_error(result: GenerateResult) -> RequestError | None:
    """Return the reason why a result is not a turn; None if it is a turn."""
    if result.finish is FinishReason.ERROR:
        return RequestError(503, f"the engine failed: {result.error}", code="unavailable")
    if result.finish is FinishReason.ABORTED:
        return RequestError(503, "the turn was aborted", code="cancelled")
    return (
        None
        if result.tokens
        else RequestError(503, "the engine sampled nothing", code="unavailable")
    )
