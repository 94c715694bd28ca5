"""The gateway: OpenAI's chat API in front of the agent's turns, so that any agent
program runs unchanged.

Each session has a base URL, `/s/{session}/v1`, and a token that the program receives as
its API key. The conversation is recorded token by token
(`rollout/gateway/recorder.py`). The gateway chooses no engine: its owner passes
`generate`.

Invariants: every answer is OpenAI's JSON or its stream of events, whatever the client
sends; a client has access only to the session of its token; the generation stops when
the client disconnects, and does not wait for a client that reads slowly. This requires
`handler_cancellation`: use `serve_gateway`.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from aiohttp import web

from rollweave.io.http.bodies import body_of
from rollweave.io.http.guard import Guard, sent_token
from rollweave.io.http.listening import listening
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.replies import ToolFormat
from rollweave.rollout.gateway.answering import (
    COUNTS,
    MAX_BODY,
    add_apis,
    answer,
    apis,
    errors_of,
    identity,
    ignored,
    model_object,
)
from rollweave.rollout.gateway.fields import RequestError, Unread
from rollweave.rollout.gateway.preparing import Aside
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.rollout.gateway.responses import Api, Json
from rollweave.rollout.gateway.sessions import Generate, Session, SessionLimits
from rollweave.schema.base import Struct
from rollweave.schema.serving import Sampling
from rollweave.schema.work import Ignored, TokenSequence, Unreadable

MAX_SESSIONS: Final = 100_000
"""Maximum number of open sessions."""

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
    contains them. `ignored` are the fields of its requests that had no effect.
    """

    sequences: tuple[TokenSequence, ...]
    undelivered_tokens: int = 0
    ignored: tuple[Ignored, ...] = ()


class Gateway:
    """Sessions of one model. `generate` samples their turns unless a session has its
    own `generate`. `tools` is the format of the model's tool calls; None takes the
    format of its chat template, if known. `unconstrained` is the reason why its engines
    cannot constrain answers.
    """

    def __init__(
        self,
        codec: ChatCodec,
        generate: Generate | None = None,
        *,
        model: str,
        tools: ToolFormat | None = None,
        unconstrained: str = "",
    ) -> None:
        self._unconstrained = unconstrained
        self._codec, self._generate, self._model = codec, generate, model
        self._tools = tools or codec.tool_format
        self._apis = apis(codec)
        self._sessions: dict[str, Session] = {}
        self._aside = Aside()
        self._started = int(time.time())

    def open(
        self,
        id: str,
        *,
        generate: Generate | None = None,
        limits: SessionLimits | None = None,
        sampling: Sampling | None = None,
        pinned: bool = False,
        unreadable: Unreadable = "ignore",
        token: str = "",
    ) -> Access:
        """Open a new session. `sampling` holds the defaults of a request, or with
        `pinned` always applies. Fields that neither the model nor its chat template can
        read are ignored and recorded, or with `unreadable` "refuse" refused. Requests
        must have `token`, or a new token if it is "".

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
            aside=self._aside,
            unconstrained=self._unconstrained,
            unreadable=unreadable,
            token=token,
        )
        self._sessions[id] = session
        return Access(path=f"/s/{id}/v1", token=session.token)

    def session(self, id: str) -> Session:
        """Return the session, for callers in this process. Raises KeyError if there is
        no such session.
        """
        return self._sessions[id]

    def sequences(self, id: str) -> tuple[TokenSequence, ...]:
        """Return the sequences that session `id` has recorded so far. Raises KeyError
        if there is no such session.
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
            sequences=recorder.sequences(),
            undelivered_tokens=recorder.undelivered_tokens,
            ignored=session.ignored.entries(),
        )

    def end(self) -> None:
        """End the thread and the process of large requests."""
        self._aside.close()

    def app(self) -> web.Application:
        """Return the application, which must be served with `handler_cancellation`."""
        app = web.Application()
        base = "/s/{session}/v1"
        for probed in ("/s/{session}", base):
            app.router.add_get(probed, self._probe)
        add_apis(
            app,
            base,
            self._apis,
            answer=self._answer,
            count=self._count,
            model=self._model_object,
        )
        served = {**self._apis, **{path: self._apis[of] for path, of in COUNTS.items()}}
        paths = {"/v1" + path: api for path, api in served.items()}
        app.middlewares.append(errors_of(paths))
        return app

    async def _probe(self, request: web.Request) -> web.StreamResponse:
        """Answer a client that asks whether the address is served."""
        id = request.match_info["session"]
        if id not in self._sessions:
            raise _unknown(id)
        return web.json_response({"status": "ok"})

    def _model_object(self, request: web.Request, name: str) -> Json:
        context = self._session(request).limits.context
        root = self._model
        return model_object(name or root, root=root, created=self._started, context=context)

    async def _answer(self, request: web.Request, api: Api) -> web.StreamResponse:
        session, body, chat, unread = await self._read(request, api)
        key, repeated = identity(request, body)
        chat = msgspec.structs.replace(chat, model=chat.model or self._model)
        return await answer(
            request,
            [(session, chat)],
            api,
            unread=unread,
            key=key,
            repeated=repeated,
        )

    async def _count(self, request: web.Request, api: Api) -> web.StreamResponse:
        session, body, chat, unread = await self._read(request, api, counts=True)
        tokens = await session.beside(lambda: session.prompt_of(chat), size=len(body))
        return web.json_response(api.count(len(tokens)), headers=ignored(unread))

    async def _read(
        self, request: web.Request, api: Api, *, counts: bool = False
    ) -> tuple[Session, bytes, ChatRequest, list[Unread]]:
        """Return the session of a request, its body, and what the body asks for."""
        session = self._session(request)
        body = await body_of(request, most=MAX_BODY)
        chat, unread = await session.beside(
            lambda: session.readable(api.parse(body, counts=counts)), size=len(body)
        )
        session.ignored.add(unread)
        return session, body, chat, unread

    def _session(self, request: web.Request) -> Session:
        """Return the session of the path if the client has its token."""
        id = request.match_info["session"]
        session = self._sessions.get(id)
        if session is None:
            raise _unknown(id)
        sent = [request.headers.getall(name, []) for name in ("Authorization", "X-Api-Key")]
        if not session.accepts_token(sent_token(*sent)):
            text = "the bearer token must be that of the session"
            raise RequestError(401, text, code="invalid_api_key")
        return session


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
        try:
            yield address
        finally:
            gateway.end()


class GatewayListener:
    """A world's gateway, which listens on the loopback once an agent program needs it.

    All calls belong to one event loop.
    """

    def __init__(self, codec: ChatCodec, *, model: str, unconstrained: str = "") -> None:
        self.gateway = Gateway(codec, model=model, unconstrained=unconstrained)
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


def _unknown(id: str) -> RequestError:
    return RequestError(404, f"session must be open, got {id!r:.80}", code="session_not_found")
