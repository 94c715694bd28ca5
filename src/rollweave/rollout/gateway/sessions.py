"""The open sessions of a gateway: who may ask what in each, the turns under way, and
what was recorded.

Invariants: a session is reached with its own token only; calls, sampled tokens and
turns at once are bounded; a turn is generated as long as somebody waits for it, and
cancelled when the last one has gone; a closed session generates nothing.
"""

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass

import msgspec

from rollweave.envs.base import mix
from rollweave.rollout.chat.codec import ChatCodec, ChatError
from rollweave.rollout.chat.tools import ToolFormat
from rollweave.rollout.gateway.dialogue import OWN, Ask, RequestError
from rollweave.rollout.gateway.recorder import Call, CallState, SessionRecorder
from rollweave.rollout.gateway.replies import read_turn
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import Finish, GenerateResult, Sampling
from rollweave.schema.work import StopReason

Generate = Callable[[str, tuple[int, ...], Sampling], Awaitable[GenerateResult]]
"""`generate(session, tokens, sampling)`: the agent's turn.

Raises EngineError where there is none; may be cancelled.
"""


CHARS_PER_TOKEN = 16
"""Characters of messages and tools for each token of the context, beyond which they are
refused unread: tokenizing takes a second a megabyte, and all trajectories wait
meanwhile.
"""


class SessionLimits(Struct, frozen=True, kw_only=True):
    """Bounds of one session.

    `context` and `tokens` count tokens: of prompt and turn together, and of all turns'
    output.
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
    """A call's way from the engine to the client.

    `task` never raises but by cancellation: failures are in `error`.
    """

    call: Call
    forced: str
    waiting: int = 0
    task: asyncio.Task[None] | None = None
    error: RequestError | None = None
    message: Message | None = None
    shown: int = 0
    """Characters of the sampled text that are in the message."""


class Session:
    """One agent program's conversations.

    `sampling` holds where the client says nothing; all the time if `pinned`.
    """

    def __init__(
        self,
        id: str,
        *,
        codec: ChatCodec,
        tools: ToolFormat | None,
        generate: Generate,
        limits: SessionLimits,
        sampling: Sampling,
        pinned: bool,
    ) -> None:
        self.id, self.limits = id, limits
        self.exhausted: StopReason | None = None
        self.refused = ""
        """Why the last prompt that did not fit into the context was refused."""
        """The limit for which the last turn was refused, if waiting does not help."""
        self.token = secrets.token_urlsafe(32)
        self.recorder = SessionRecorder(codec)
        self.closed = False
        self._codec, self._tools, self._generate = codec, tools, generate
        self._sampling, self._pinned = sampling, pinned
        self._turns: dict[Call, Turn] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._spent = 0

    @property
    def calls(self) -> int:
        """Turns that were asked for, but those that were given up."""
        return len(self._turns)

    def admits(self, token: str) -> bool:
        """Whether this is the session's token."""
        return hmac.compare_digest(token.encode(errors="surrogateescape"), self.token.encode())

    @contextlib.asynccontextmanager
    async def turn(self, ask: Ask, key: Hashable, *, repeated: bool) -> AsyncIterator[Turn]:
        """The turn that is asked for, as long as somebody attends it. Raises
        RequestError.

        Who attends calls `deliver` once the client has the answer; where nobody did,
        the answer is lost.
        """
        turn = self._turn(ask, key, repeated)
        turn.waiting += 1
        try:
            yield turn
        finally:
            turn.waiting -= 1
            if not turn.waiting:
                self._cancel(turn)
                self.recorder.lose(turn.call)

    def deliver(self, turn: Turn) -> None:
        """The client has the answer."""
        self.recorder.deliver(turn.call)

    def close(self) -> None:
        """End what is under way; whoever waits gets an error."""
        self.closed = True
        for turn in list(self._turns.values()):
            self._cancel(turn)

    async def ended(self) -> None:
        """`close`, and return when nothing is under way."""
        self.close()
        while self._under_way:
            await asyncio.wait(list(self._under_way))

    def _turn(self, ask: Ask, key: Hashable, repeated: bool) -> Turn:
        if self.closed:
            raise RequestError(
                404,
                f"session must be open, got {self.id!r:.80}, which is over",
                code="session_not_found",
            )
        forced = ""
        self._check_size(ask)
        if ask.tools:
            self._check_tools(ask)
        if ask.call is not None and self._tools is not None:
            forced = self._tools.opening(ask.call)
        try:
            call = self.recorder.ask(key, ask.messages, ask.tools, forced=forced, repeated=repeated)
        except ChatError as error:
            raise RequestError(400, f"messages: {error}", param="messages") from error
        turn = self._turns.get(call)
        if turn is None:
            turn = Turn(call, forced)
            try:
                sampling = self._admit(ask, call)
            except RequestError:
                self.recorder.drop(call)
                raise
            self._turns[call] = turn
            turn.task = asyncio.create_task(
                self._take_turn(turn, ask, sampling), name=f"{self.id}-{call.number}"
            )
            self._under_way.add(turn.task)
            turn.task.add_done_callback(self._under_way.discard)
        return turn

    def _check_size(self, ask: Ask) -> None:
        chars = sum(map(len, ask.tools)) + sum(
            len(message.content) + sum(len(call.arguments) for call in message.tool_calls)
            for message in ask.messages
        )
        most = CHARS_PER_TOKEN * self.limits.context
        if chars > most:
            self.exhausted = StopReason.MAX_TOKENS
            context = f"a context of {self.limits.context} tokens"
            self.refused = (
                f"messages and tools must have at most {most} characters in {context}, got {chars}"
            )
            raise RequestError(400, self.refused, param="messages", code="context_length_exceeded")

    def _check_tools(self, ask: Ask) -> None:
        if not self._codec.shows_tools:
            raise RequestError(
                400, "tools must be none: this model's chat template shows none", param="tools"
            )
        if ask.call is not None and self._tools is None:
            raise RequestError(
                400,
                "tool_choice must be auto or none: it is not known how this model calls",
                param="tool_choice",
            )

    def _admit(self, ask: Ask, call: Call) -> Sampling:
        """How to sample the call. Raises RequestError for what is beyond a limit."""
        limits = self.limits
        running = sum(
            turn.task is not None and not turn.task.done() for turn in self._turns.values()
        )
        if running >= limits.concurrent:
            raise RequestError(
                429,
                f"calls at once must be at most {limits.concurrent}",
                code="rate_limit_exceeded",
            )
        if len(self._turns) >= limits.calls:
            self.exhausted = StopReason.MAX_TURNS
            raise RequestError(
                429, f"calls of a session must be at most {limits.calls}", code="insufficient_quota"
            )
        if self._spent >= limits.tokens:
            self.exhausted = StopReason.MAX_TOKENS
            raise RequestError(
                429,
                f"tokens sampled in a session must be at most {limits.tokens}",
                code="insufficient_quota",
            )
        room = limits.context - len(call.prompt)
        if room < 1:
            self.exhausted = StopReason.MAX_TOKENS
            self.refused = (
                f"messages must leave room in a context of {limits.context} tokens, got "
                f"{len(call.prompt)} tokens"
            )
            raise RequestError(400, self.refused, param="messages", code="context_length_exceeded")
        self.exhausted = None
        return self._sampling_of(
            ask, call, min(room, limits.turn_tokens, limits.tokens - self._spent)
        )

    def _sampling_of(self, ask: Ask, call: Call, room: int) -> Sampling:
        base = self._sampling
        one_call = (
            (self._tools.closing,)
            if self._tools is not None and ask.reads_calls and ask.one_call
            else ()
        )
        asked = (
            {}
            if self._pinned
            else {name: value for name in OWN if (value := getattr(ask, name)) is not None}
        )
        return msgspec.structs.replace(
            base,
            max_tokens=min(room, ask.max_tokens or room),
            stop_token_ids=tuple(
                dict.fromkeys(
                    (*self._codec.stop_token_ids, *base.stop_token_ids, *ask.stop_token_ids)
                )
            ),
            stop=(*self._codec.stop, *base.stop, *ask.stop, *one_call),
            # Two calls of the same prompt are two samples, in the same way each time
            # the session is played.
            **{"seed": mix(base.seed, call.number), **asked},
        )

    async def _take_turn(self, turn: Turn, ask: Ask, sampling: Sampling) -> None:
        try:
            async with asyncio.timeout(self.limits.turn_s):
                result = await self._generate(self.id, turn.call.prompt, sampling)
            turn.error = turn.error or _refused(result)
            if turn.error is None:
                self._take(turn, ask, result)
        except TimeoutError:
            turn.error = RequestError(
                504, f"the turn took more than {self.limits.turn_s:g} s", code="timeout"
            )
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

    def _take(self, turn: Turn, ask: Ask, result: GenerateResult) -> None:
        stop = (*self._codec.stop, *self._sampling.stop, *ask.stop)
        tools = self._tools if ask.reads_calls else None
        turn.message, turn.shown = read_turn(
            self._codec,
            tools,
            result,
            number=turn.call.number,
            forced=turn.forced,
            stop=stop,
            stop_tokens=ask.stop_token_ids,
        )
        self.recorder.answer(turn.call, result, turn.message)
        self._spent += len(result.tokens)

    def _cancel(self, turn: Turn) -> None:
        """Stop a turn that is under way; from now on it is as if it had not been asked."""
        if turn.task is not None and not turn.task.done():
            turn.error = RequestError(503, "the turn was cancelled", code="cancelled")
            turn.task.cancel()
            self._forget(turn)

    def _forget(self, turn: Turn) -> None:
        """Keep nothing of a turn without answer."""
        if turn.call.state is CallState.ASKED:
            self.recorder.drop(turn.call)
            del self._turns[turn.call]


def _refused(result: GenerateResult) -> RequestError | None:
    """Why a result is no turn: None where it is one."""
    if result.finish is Finish.ERROR:
        return RequestError(503, f"the engine failed: {result.error}", code="unavailable")
    if result.finish is Finish.ABORTED:
        return RequestError(503, "the turn was aborted", code="cancelled")
    return (
        None
        if result.tokens
        else RequestError(503, "the engine sampled nothing", code="unavailable")
    )
