"""The gateway: OpenAI's chat API in front of the agent's turns, so that any agent
program runs unchanged.

Each session has a base URL, `/s/{session}/v1`, and a token that the program receives as
its API key. The conversation is recorded token by token
(`rollout/gateway/recorder.py`). The gateway chooses no engine: its owner passes
`generate`.

Invariants: every answer is OpenAI's JSON or its stream of events, whatever the client
sends; a client has access only to the session of its token; the generation stops when
the client disconnects, and does not wait for one that reads slowly. This requires
`handler_cancellation`: use `serve_gateway`.
"""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Final

import xxhash
from aiohttp import web

from rollweave.io.http.bodies import BodyError, body_of
from rollweave.io.http.guard import Guard, Refused
from rollweave.io.http.listening import listening
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.tools import ToolFormat
from rollweave.rollout.gateway.deltas import (
    ContradictionError,
    DeltaReader,
    TextDelta,
    text_deltas,
)
from rollweave.rollout.gateway.requests import ChatRequest, RequestError, parse_chat
from rollweave.rollout.gateway.responses import (
    ChatReply,
    Chunks,
    Json,
    ReplyHead,
    completion,
    finish_reason,
)
from rollweave.rollout.gateway.sessions import Generate, Session, SessionLimits, Turn
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message
from rollweave.schema.rollouts import IDEMPOTENCY_KEY
from rollweave.schema.serving import GenerateResult, Sampling
from rollweave.schema.work import TokenSequence

MAX_BODY: Final = 16 * 2**20
"""Maximum bytes of a request: four times a context of a million tokens of plain text.
"""

MAX_SESSIONS: Final = 100_000
"""Maximum number of open sessions."""

BODY_S: Final = 60.0
"""Seconds that a client has to send its request."""

KEEP_ALIVE_S: Final = 15.0
"""Seconds of silence after which a stream sends a comment: proxies give up after about
30.
"""

WRITE_S: Final = 60.0
"""Seconds that a client has to read what is sent, before it is disconnected."""

SESSION_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Access(Struct, frozen=True, kw_only=True):
    """The access of an agent program: `OPENAI_BASE_URL` ends with `path`,
    `OPENAI_API_KEY` is `token`.
    """

    path: str
    token: str


class SessionRecording(Struct, frozen=True, kw_only=True):
    """The recording of a session.

    `undelivered_tokens` were sampled for answers that never arrived: no sequence
    contains them.
    """

    sequences: tuple[TokenSequence, ...]
    undelivered_tokens: int = 0


class Gateway:
    """Sessions of one model. `generate` samples their turns unless a session has its
    own.

    `tools` is the format of the model's tool calls; None takes that of its chat
    template, if known.
    """

    def __init__(
        self,
        codec: ChatCodec,
        generate: Generate | None = None,
        *,
        model: str,
        tools: ToolFormat | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._codec, self._generate, self._model = codec, generate, model
        self._tools = tools or codec.tool_format
        self._keep_alive_s = keep_alive_s
        self._sessions: dict[str, Session] = {}
        self._started = int(time.time())

    def open(
        self,
        id: str,
        *,
        generate: Generate | None = None,
        limits: SessionLimits | None = None,
        sampling: Sampling | None = None,
        pinned: bool = False,
    ) -> Access:
        """Open a new session. `sampling` holds the defaults of a request, or with
        `pinned` always applies.

        Raises ValueError for an id that is taken or cannot be part of a path.
        """
        if not SESSION_ID.fullmatch(id):
            raise ValueError(f"session.id must match {SESSION_ID.pattern}, got {id!r}")
        if id in self._sessions:
            raise ValueError(f"session.id must be new, got {id!r} again")
        if len(self._sessions) >= MAX_SESSIONS:
            raise ValueError(f"open sessions must be at most {MAX_SESSIONS}, got one more")
        generate = generate or self._generate
        if generate is None:
            raise ValueError("generate must be the gateway's or the session's, got none")
        session = Session(
            id,
            codec=self._codec,
            tools=self._tools,
            generate=generate,
            limits=limits or SessionLimits(),
            sampling=sampling or Sampling(),
            pinned=pinned,
        )
        self._sessions[id] = session
        return Access(path=f"/s/{id}/v1", token=session.token)

    def session(self, id: str) -> Session:
        """Return the session, for callers in this process. Raises KeyError if there is
        none.
        """
        return self._sessions[id]

    def sequences(self, id: str) -> tuple[TokenSequence, ...]:
        """Return what session `id` has recorded so far.

        Raises KeyError if there is none.
        """
        return self._sessions[id].recorder.sequences()

    def close(self, id: str) -> SessionRecording:
        """Close a session, cancel its turns in progress, and return its recording.
        Raises KeyError.
        """
        session = self._sessions.pop(id)
        session.close()
        recorder = session.recorder
        return SessionRecording(
            sequences=recorder.sequences(), undelivered_tokens=recorder.undelivered_tokens
        )

    def app(self) -> web.Application:
        """Return the application, which must be served with `handler_cancellation`."""
        app = web.Application(middlewares=[_in_openai_json])
        app.router.add_get("/s/{session}/v1/models", self._models)
        app.router.add_post("/s/{session}/v1/chat/completions", self._chat)
        return app

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "rollweave",
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await body_of(request, most=MAX_BODY, seconds=BODY_S)
        chat = parse_chat(body)
        key, repeated = _identity(request, body)
        async with session.turn(chat, key, repeated=repeated) as turn:
            return await (self._stream if chat.stream else self._completion)(
                request, session, turn, chat
            )

    async def _completion(
        self, request: web.Request, session: Session, turn: Turn, chat: ChatRequest
    ) -> web.StreamResponse:
        await _turn_ended(turn, None)
        result, message = _outcome(turn)
        deltas: Sequence[TextDelta] = ()
        if chat.logprobs:
            deltas = text_deltas(self._codec, result, length=turn.shown, logprobs=True)
        body = completion(_head(session, turn, chat), _reply(turn, result, message, deltas), chat)
        response = web.json_response(body)
        await response.prepare(request)
        await response.write_eof()
        session.deliver(turn)
        return response

    async def _stream(
        self, request: web.Request, session: Session, turn: Turn, chat: ChatRequest
    ) -> web.StreamResponse:
        """Stream the reply.

        Status and headers wait for the first text, so that errors before it are plain
        responses, but no longer than clients wait.
        """
        stream = _EventStream(request)
        chunks = Chunks(_head(session, turn, chat), chat, forced=turn.forced)
        try:
            try:
                await self._send_turn(stream, chunks, session.deltas_of(turn, chat), turn)
            except ContradictionError as error:
                text = f"the stream is broken off: {error}"
                await stream.fail(RequestError(503, text, code="stream_broken_off"))
            except RequestError as error:
                await stream.fail(error)
            else:
                await stream.end()
                session.deliver(turn)
        except TimeoutError:
            stream.break_off()
        return stream.response

    async def _send_turn(
        self, stream: "_EventStream", chunks: Chunks, reader: DeltaReader, turn: Turn
    ) -> None:
        """Send all chunks of the turn. Raises RequestError if the turn fails."""
        while not turn.ended:
            news = turn.news
            await stream.send(chunks.progress(reader.read(turn.tokens, turn.logprobs)))
            if not await _turn_ended(turn, self._keep_alive_s, news) and not news.done():
                await stream.keep_alive()
        result, message = _outcome(turn)
        deltas = reader.finish(result.tokens, result.logprobs, turn.shown)
        await stream.send(chunks.rest(_reply(turn, result, message, deltas)))

    def _session(self, request: web.Request) -> Session:
        """Return the session of the path if the client has its token."""
        id = request.match_info["session"]
        session = self._sessions.get(id)
        if session is None:
            raise _unknown(id)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not session.accepts_token(token.strip()):
            text = "the bearer token must be that of the session"
            raise RequestError(401, text, code="invalid_api_key")
        return session


class _EventStream:
    """A stream of events in response to one request.

    Everything that is sent raises TimeoutError if the client has not read it within
    `WRITE_S`.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

    async def send(self, chunks: Iterable[Json]) -> None:
        """Send chunks, if there are any."""
        if data := b"".join(map(_event, chunks)):
            await self._write(data)

    async def keep_alive(self) -> None:
        """Send a comment."""
        await self._write(b": the turn is in progress\n\n")

    async def fail(self, error: RequestError) -> None:
        """Send an error as the last event; raise it if nothing has been sent."""
        if not self.response.prepared:
            raise error
        await self._write(_event(error.body()), last=True)

    async def end(self) -> None:
        """Send the mark of a complete stream."""
        await self._write(b"data: [DONE]\n\n", last=True)

    def break_off(self) -> None:
        """Disconnect the client."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        async with asyncio.timeout(WRITE_S):
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(data)
            if last:
                await self.response.write_eof()


def _head(session: Session, turn: Turn, chat: ChatRequest) -> ReplyHead:
    id = f"chatcmpl-{session.id}-{turn.call.number}"
    return ReplyHead(id=id, created=int(time.time()), model=chat.model)


def _outcome(turn: Turn) -> tuple[GenerateResult, Message]:
    """Return the result of a turn that has ended, and its message; or raise its
    RequestError.
    """
    if turn.error is not None:
        raise turn.error
    result, message = turn.call.result, turn.message
    assert result is not None, "a turn without error has a result"
    assert message is not None, "and a message"
    return result, message


def _reply(
    turn: Turn, result: GenerateResult, message: Message, deltas: Sequence[TextDelta]
) -> ChatReply:
    return ChatReply(
        message=message,
        deltas=tuple(deltas),
        finish_reason=finish_reason(message, result.finish),
        prompt_tokens=turn.call.prompt_tokens,
        completion_tokens=len(result.tokens),
        cached_tokens=result.cached_tokens,
    )


@contextlib.asynccontextmanager
async def serve_gateway(
    gateway: Gateway, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:
    """Serve while the context is open; yield the base URL. Port 0 chooses a free port.

    Each session has its own token.
    """
    async with listening(
        gateway.app(), host, port, guard=Guard(token=None), shutdown_s=1.0
    ) as address:
        yield address


class GatewayListener:
    """A world's gateway, which listens on the loopback once an agent program needs it.

    All calls belong to one event loop.
    """

    def __init__(self, codec: ChatCodec, *, model: str) -> None:
        self.gateway = Gateway(codec, model=model)
        self._opening = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._url: str | None = None
        self._closed = False

    async def url(self) -> str:
        """Return the base URL of the gateway; start to listen at the first call.

        Raises OSError if it cannot listen, RuntimeError once it is closed.
        """
        async with self._opening:
            if self._closed:
                raise RuntimeError("the gateway is closed: the run is ending")
            if self._url is None:
                self._url = await self._stack.enter_async_context(serve_gateway(self.gateway))
            return self._url

    async def close(self) -> None:
        """Stop listening."""
        async with self._opening:
            self._closed = True
            await self._stack.aclose()


async def _turn_ended(
    turn: Turn, timeout_s: float | None, news: asyncio.Future[None] | None = None
) -> bool:
    """Wait for the end of the turn, successful or not, or for `news`, without
    cancelling it.
    """
    assert turn.task is not None, "a turn has a task from the start"
    waited: list[asyncio.Future[None]] = [turn.task] if news is None else [turn.task, news]
    await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return turn.task.done()


def _identity(request: web.Request, body: bytes) -> tuple[tuple[str, bytes], bool]:
    """Return a key that is equal for equal requests, and whether the client marks this
    one as a retry.

    OpenAI's clients count their retries in a header; others may name a request with an
    idempotency key.
    """
    name = request.headers.get(IDEMPOTENCY_KEY, "")
    tries = request.headers.get("X-Stainless-Retry-Count", "0")
    return (name, xxhash.xxh3_128_digest(body)), bool(name) or tries not in ("", "0")


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _unknown(id: str) -> RequestError:
    return RequestError(404, f"session must be open, got {id!r:.80}", code="session_not_found")


_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _in_openai_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure into OpenAI's error object."""
    try:
        return await handler(request)
    except RequestError as error:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        return web.json_response(error.body(), status=error.status, headers=headers)
    except (Refused, BodyError) as error:
        return web.json_response(
            RequestError(error.status, error.reason).body(), status=error.status
        )
    except web.HTTPException as error:
        rule = {
            404: "path must be one that is served",
            405: "method must be one that the path takes",
        }
        text = f"{rule.get(error.status, error.reason)}, got {request.method} {request.path:.200}"
        return web.json_response(RequestError(error.status, text).body(), status=error.status)
    except ConnectionError:
        raise  # the client is gone
    except Exception as error:
        _log.exception("%s %s failed", request.method, request.path)
        return web.json_response(
            RequestError(500, f"{type(error).__name__}: {error}").body(), status=500
        )
