"""The gateway: OpenAI's chat API in front of the agent's turns, so that any agent
program runs as it is.

Each session is a base URL, `/s/{session}/v1`, and a token, which the program gets as
its API key. What it is told and what it samples is recorded token by token
(`rollout/gateway/recorder.py`). The gateway chooses no engine: its owner passes
`generate`.

Invariants: whatever a client sends, the answer is OpenAI's JSON, or its stream of
events; nobody reaches another's session; a client that goes away stops its generation.
Served without `handler_cancellation` that last one would not hold: use `serve`.
"""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import xxhash
from aiohttp import web

from rollweave.io.http.bodies import BodyError, body_of
from rollweave.io.http.guard import Guard, Refused
from rollweave.io.http.listening import listening
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.tools import ToolFormat
from rollweave.rollout.gateway.dialogue import Ask, RequestError, parse_chat
from rollweave.rollout.gateway.replies import Json, Reply, chunks, finish_reason, pieces_of, whole
from rollweave.rollout.gateway.sessions import Generate, Session, SessionLimits, Turn
from rollweave.schema.base import Struct
from rollweave.schema.serving import Sampling
from rollweave.schema.work import TokenSequence

MAX_BODY: Final = 16 * 2**20
"""Bytes of a request: four times a context of a million tokens of plain text."""

MAX_SESSIONS: Final = 100_000

BODY_S: Final = 60.0
"""Seconds that a client has to send its request."""

KEEP_ALIVE_S: Final = 15.0
"""Seconds of silence after which a stream says that it lives: proxies give up after
about 30.
"""

SESSION_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Access(Struct, frozen=True, kw_only=True):
    """What an agent program is given: `OPENAI_BASE_URL` ends with `path`,
    `OPENAI_API_KEY` is `token`.
    """

    path: str
    token: str


class Recorded(Struct, frozen=True, kw_only=True):
    """What came of a session.

    `undelivered_tokens` were sampled for answers that never arrived: no sequence has
    them.
    """

    sequences: tuple[TokenSequence, ...]
    undelivered_tokens: int = 0


class Gateway:
    """Sessions of one model, whose turns are `generate`d, unless a session brings its
    own.

    `tools` says how the model calls tools; None: as its chat template tells it to, if
    that is known.
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
        """A new session. `sampling` holds where the client says nothing, and with
        `pinned` whatever it says.

        Raises ValueError for an id that is taken or cannot stand in a path.
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
        """For whoever asks in process. Raises KeyError where there is none."""
        return self._sessions[id]

    def sequences(self, id: str) -> tuple[TokenSequence, ...]:
        """What session `id` has recorded so far.

        Raises KeyError where there is none.
        """
        return self._sessions[id].recorder.sequences()

    def close(self, id: str) -> Recorded:
        """End a session, whose turns under way are cancelled, and hand over what it
        recorded. Raises KeyError.
        """
        session = self._sessions.pop(id)
        session.close()
        recorder = session.recorder
        return Recorded(
            sequences=recorder.sequences(), undelivered_tokens=recorder.undelivered_tokens
        )

    def app(self) -> web.Application:
        """The application, to be served with `handler_cancellation`."""
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
        ask = parse_chat(body)
        key, repeated = _identity(request, body)
        async with session.turn(ask, key, repeated=repeated) as turn:
            return await (self._stream if ask.stream else self._whole)(request, session, turn, ask)

    async def _whole(
        self, request: web.Request, session: Session, turn: Turn, ask: Ask
    ) -> web.StreamResponse:
        await _settled(turn, None)
        response = web.json_response(whole(self._reply(session, turn, ask), ask))
        await response.prepare(request)
        await response.write_eof()
        session.deliver(turn)
        return response

    async def _stream(
        self, request: web.Request, session: Session, turn: Turn, ask: Ask
    ) -> web.StreamResponse:
        """Status and headers wait for the turn, so that errors are plain ones, but not
        longer than clients do.
        """
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        while not await _settled(turn, self._keep_alive_s):
            if not response.prepared:
                await response.prepare(request)
            await response.write(b": the turn is under way\n\n")
        if turn.error is not None and response.prepared:
            await response.write(_event(turn.error.body()))
            await response.write_eof()
            return response
        reply = self._reply(session, turn, ask)
        if not response.prepared:
            await response.prepare(request)
        for chunk in chunks(reply, ask, forced=turn.forced):
            await response.write(_event(chunk))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        session.deliver(turn)
        return response

    def _reply(self, session: Session, turn: Turn, ask: Ask) -> Reply:
        """The answer, or its RequestError."""
        if turn.error is not None:
            raise turn.error
        result, message = turn.call.result, turn.message
        assert result is not None, "a turn without error has a result"
        assert message is not None, "and a message"
        return Reply(
            id=f"chatcmpl-{session.id}-{turn.call.number}",
            created=int(time.time()),
            model=ask.model,
            message=message,
            pieces=pieces_of(self._codec, result, length=turn.shown, logprobs=ask.logprobs)
            if ask.stream or ask.logprobs
            else (),
            finish_reason=finish_reason(message, result.finish),
            prompt_tokens=turn.call.prompt_tokens,
            completion_tokens=len(result.tokens),
            cached_tokens=result.cached_tokens,
        )

    def _session(self, request: web.Request) -> Session:
        """The session of the path, for whoever has its token."""
        id = request.match_info["session"]
        session = self._sessions.get(id)
        if session is None:
            raise _unknown(id)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not session.admits(token.strip()):
            text = "the bearer token must be that of the session"
            raise RequestError(401, text, code="invalid_api_key")
        return session


@contextlib.asynccontextmanager
async def serve_gateway(
    gateway: Gateway, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:
    """Serve while the context is open, and give the base URL. Port 0 is a free one.

    Each session has its own token.
    """
    async with listening(
        gateway.app(), host, port, guard=Guard(token=None), shutdown_s=1.0
    ) as address:
        yield address


async def _settled(turn: Turn, timeout_s: float | None) -> bool:
    """Wait for the turn's end, whether good or bad, without cancelling it."""
    assert turn.task is not None, "a turn is under way from the start"
    await asyncio.wait([turn.task], timeout=timeout_s)
    return turn.task.done()


def _identity(request: web.Request, body: bytes) -> tuple[tuple[str, bytes], bool]:
    """What makes two requests the same, and whether the client says that this one is
    sent again.

    OpenAI's clients count their retries in a header; others may name a request with an
    idempotency key.
    """
    name = request.headers.get("Idempotency-Key", "")
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
    """Every failure as OpenAI's error object."""
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
        raise  # nobody is there to be answered
    except Exception as error:
        _log.exception("%s %s failed", request.method, request.path)
        return web.json_response(
            RequestError(500, f"{type(error).__name__}: {error}").body(), status=500
        )
