"""Answers the requests of all APIs: complete, or as streams of events.

Invariants: every answer is the API's JSON or its stream of events, whatever the client
sends; the generation stops when the client disconnects, and does not wait for one that
reads slowly. This requires `handler_cancellation`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final

import xxhash
from aiohttp import web
from aiohttp.typedefs import Middleware

from rollweave.io.http.bodies import BodyError
from rollweave.io.http.guard import Refused
from rollweave.rollout.gateway.aside import INLINE_TOKENS
from rollweave.rollout.gateway.deltas import (
    ContradictionError,
    DeltaReader,
    TextDelta,
    text_deltas,
)
from rollweave.rollout.gateway.refusals import RequestError
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.rollout.gateway.responses import (
    Api,
    ChatApi,
    ChatReply,
    Json,
    ReplyHead,
    TurnStream,
    finish_reason,
)
from rollweave.rollout.gateway.sessions import Session, Turn
from rollweave.schema.chat import Message
from rollweave.schema.packing import as_json
from rollweave.schema.rollouts import IDEMPOTENCY_KEY
from rollweave.schema.serving import GenerateResult

MAX_BODY: Final = 96 * 2**20
"""Maximum bytes of a request: the images of a prompt in base64 (`PROMPT_IMAGE_BYTES`),
and the text of a million tokens.
"""

KEEP_ALIVE_S: Final = 15.0
"""Seconds of silence after which a stream sends a comment: proxies give up after about
30.
"""

WRITE_S: Final = 60.0
"""Seconds that a client has to read what is sent, before it is disconnected."""


async def answer(
    request: web.Request,
    session: Session,
    api: Api,
    chat: ChatRequest,
    *,
    key: Hashable,
    repeated: bool,
    keep_alive_s: float,
) -> web.StreamResponse:
    """Generate the turn that a client requests, and answer. Raises RequestError."""
    async with session.turn(chat, key, repeated=repeated) as turn:
        if chat.stream:
            return await _stream(request, session, turn, chat, api, keep_alive_s)
        return await _complete(request, session, turn, chat, api)


async def _complete(
    request: web.Request, session: Session, turn: Turn, chat: ChatRequest, api: Api
) -> web.StreamResponse:
    await _turn_ended(turn, None)
    result, message = _outcome(turn)
    head = _head(session, turn, chat, api)

    def written() -> bytes:
        deltas: Sequence[TextDelta] = ()
        if chat.logprobs:
            codec = session.codec_of(chat)
            deltas = text_deltas(codec, result, length=turn.shown, logprobs=True)
        return as_json(api.response(head, _reply(turn, result, message, deltas), chat))

    tokens = len(result.tokens) + len(result.prompt_logprobs)
    body = await session.beside(written, size=tokens, most=INLINE_TOKENS)
    response = web.Response(body=body, content_type="application/json", charset="utf-8")
    await response.prepare(request)
    await response.write_eof()
    session.deliver(turn)
    return response


async def _stream(
    request: web.Request,
    session: Session,
    turn: Turn,
    chat: ChatRequest,
    api: Api,
    keep_alive_s: float,
) -> web.StreamResponse:
    """Stream the reply.

    Status and headers wait for the first text, so that errors before it are plain
    responses, but no longer than clients wait.
    """
    stream = _EventStream(request, api)
    events = api.stream(_head(session, turn, chat, api), chat, forced=turn.forced)
    try:
        try:
            await _send_turn(stream, events, session.deltas_of(turn, chat), turn, keep_alive_s)
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
    stream: "_EventStream",
    events: TurnStream,
    reader: DeltaReader,
    turn: Turn,
    keep_alive_s: float,
) -> None:
    """Send all events of the turn. Raises RequestError if the turn fails."""
    while not turn.ended:
        news = turn.news
        await stream.send(events.progress(reader.read(turn.tokens, turn.logprobs)))
        if not await _turn_ended(turn, keep_alive_s, news) and not news.done():
            await stream.keep_alive()
    result, message = _outcome(turn)
    deltas = reader.finish(result.tokens, result.logprobs, turn.shown)
    await stream.send(events.rest(_reply(turn, result, message, deltas)))


class _EventStream:
    """A stream of events in response to one request.

    Everything that is sent raises TimeoutError if the client has not read it within
    `WRITE_S`.
    """

    def __init__(self, request: web.Request, api: Api) -> None:
        self._request, self._api = request, api
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

    async def send(self, chunks: Iterable[Json]) -> None:
        """Send chunks, if there are any."""
        if data := b"".join(map(self._api.event, chunks)):
            await self._write(data)

    async def keep_alive(self) -> None:
        """Send a comment."""
        await self._write(b": the turn is in progress\n\n")

    async def fail(self, error: RequestError) -> None:
        """Send an error as the last event; raise it if nothing has been sent."""
        if not self.response.prepared:
            raise error
        await self._write(self._api.event(self._api.error(error)), last=True)

    async def end(self) -> None:
        """Send the mark of a complete stream."""
        await self._write(self._api.end, last=True)

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


def _head(session: Session, turn: Turn, chat: ChatRequest, api: Api) -> ReplyHead:
    id = f"{api.prefix}-{session.id}-{turn.call.number}"
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
        result=result,
    )


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


def identity(request: web.Request, body: bytes) -> tuple[tuple[str, bytes], bool]:
    """Return a key that is equal for equal requests, and whether the client marks this
    one as a retry.

    OpenAI's clients count their retries in a header; others may name a request with an
    idempotency key.
    """
    name = request.headers.get(IDEMPOTENCY_KEY, "")
    tries = request.headers.get("X-Stainless-Retry-Count", "0")
    return (name, xxhash.xxh3_128_digest(body)), bool(name) or tries not in ("", "0")


_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def errors_of(paths: Mapping[str, Api]) -> Middleware:
    """Return a middleware that turns every failure into the error of the API whose path
    the request has: of OpenAI's unless one of `paths` is its end.
    """

    @web.middleware
    async def in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionError:
            raise  # the client is gone
        except Exception as error:
            api = next((paths[end] for end in paths if request.path.endswith(end)), _OPENAI)
            return error_response(request, error, api)

    return in_json


def error_response(request: web.Request, error: Exception, api: Api) -> web.Response:
    """Return the answer to a request that failed."""
    headers = {}
    match error:
        case RequestError():
            refusal = error
            headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        case Refused() | BodyError():
            refusal = RequestError(error.status, error.reason)
        case web.HTTPException():
            rule = {
                404: "path must be one that is served",
                405: "method must be one that the path takes",
            }
            text = (
                f"{rule.get(error.status, error.reason)}, got {request.method} {request.path:.200}"
            )
            refusal = RequestError(error.status, text)
        case _:
            _log.error("%s %s failed", request.method, request.path, exc_info=error)
            refusal = RequestError(500, f"{type(error).__name__}: {error}")
    return web.json_response(api.error(refusal), status=refusal.status, headers=headers)


_OPENAI: Final = ChatApi()
