"""The APIs that clients may use, by their paths, and the answers to their requests:
complete, or as streams of events.

Invariants: every answer is the API's JSON or its stream of events, whatever the client
sends; the generation stops when the client disconnects, and does not wait for a client
that reads slowly. This requires `handler_cancellation`.
"""

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import xxhash
from aiohttp import web
from aiohttp.typedefs import Middleware

from rollweave.io.http.bodies import BodyError
from rollweave.io.http.fields import shown
from rollweave.io.http.guard import Refused
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.anthropic_messages import MessagesApi
from rollweave.rollout.gateway.completions import BatchApi, ChatApi, CompletionsApi
from rollweave.rollout.gateway.deltas import (
    ContradictionError,
    TextDelta,
    text_deltas,
)
from rollweave.rollout.gateway.fields import RequestError, TooLongError, Unread
from rollweave.rollout.gateway.openai_responses import ResponsesApi
from rollweave.rollout.gateway.preparing import INLINE_TOKENS
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.rollout.gateway.responses import (
    Api,
    ChatReply,
    Json,
    ReplyHead,
    details_of,
    finish_reason,
    usage_of,
)
from rollweave.rollout.gateway.sessions import Session, Turn
from rollweave.schema.chat import Message
from rollweave.schema.rollouts import IDEMPOTENCY_KEY
from rollweave.schema.serving import GenerateResult

_log = logging.getLogger(__name__)

COUNTS: Final = {"/messages/count_tokens": "/messages", "/responses/input_tokens": "/responses"}
"""Path at which a client counts the tokens of a prompt → the API of the prompt."""

Handler = Callable[..., Awaitable[web.StreamResponse]]


def apis(codec: TextCodec, *, served: bool = False) -> Mapping[str, Api]:
    """Return the path of each API below the base URL, and the API. With `served`,
    requests may have the fields that are allowed outside of a run.
    """
    return {
        **({"/chat/completions/batch": BatchApi(codec)} if served else {}),
        "/chat/completions": ChatApi(codec, served=served),
        "/completions": CompletionsApi(codec.plain, served=served),
        "/messages": MessagesApi(codec),
        "/responses": ResponsesApi(),
    }


def add_apis(
    app: web.Application,
    base: str,
    served: Mapping[str, Api],
    *,
    answer: Handler,
    count: Handler,
    model: Callable[[web.Request, str], Json],
) -> None:
    """Add the routes of the APIs below the path `base`. `answer` and `count` are called
    with a request and its `api`. `model` describes the model under any name, as any
    name is served, or under its own name for "".
    """
    for path, api in served.items():
        app.router.add_post(base + path, functools.partial(answer, api=api))
    for path, of in COUNTS.items():
        app.router.add_post(base + path, functools.partial(count, api=served[of]))
    app.router.add_get(base + "/responses", _no_websocket)

    async def models(request: web.Request) -> web.StreamResponse:
        one = model(request, "")
        ends = {"first_id": one["id"], "last_id": one["id"]}
        return web.json_response({"object": "list", "data": [one], "has_more": False, **ends})

    async def named(request: web.Request) -> web.StreamResponse:
        return web.json_response(model(request, request.match_info["model"]))

    app.router.add_get(base + "/models", models)
    app.router.add_get(base + "/models/{model:.+}", named)


async def _no_websocket(request: web.Request) -> web.StreamResponse:
    """Refuse a WebSocket with the status after which clients immediately use HTTP."""
    error = RequestError(426, f"method must be POST, got {request.method}: no WebSocket is served")
    return web.json_response(error.body(), status=error.status)


def model_object(name: str, *, root: str, created: int, context: int) -> Json:
    """Return a model as the clients of OpenAI, vLLM and Anthropic read it. `created` is
    in seconds of Unix time, `context` in tokens, and `root` is the name of the weights.
    """
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": created,
        "owned_by": "rollweave",
        "root": root,
        "parent": None,
        "max_model_len": context,
    }


MAX_BODY: Final = 96 * 2**20
"""Maximum bytes of a request: the text of a million tokens, and the JSON around it."""

KEEP_ALIVE_S: Final = 15.0
"""Seconds of silence after which a stream sends a comment: proxies give up after about
30.
"""

IGNORED: Final = "X-Rollweave-Ignored"
"""Header of a response that names the fields of its request that were ignored."""

MOST_IGNORED: Final = 2000
"""Maximum number of characters of that header."""

WRITE_S: Final = 60.0
"""Seconds that a client has to read what is sent, before it is disconnected."""


class _Choice(NamedTuple):
    """One choice of an answer."""

    session: Session
    turn: Turn
    chat: ChatRequest

    def head(self, api: Api) -> ReplyHead:
        call = self.turn.call
        return ReplyHead(
            id=f"{api.prefix}-{self.session.id}-{call.number}",
            created=int(time.time()),
            model=self.chat.model,
            prompt=call.prompt,
            prompt_tokens=call.prompt_tokens,
        )

    def reply(self, deltas: Sequence[TextDelta]) -> ChatReply:
        """Return the reply of a turn that has ended. Raises its RequestError."""
        result, message = _outcome(self.turn)
        thoughts = self.session.thought_tokens(self.chat, result) if message.thoughts else 0
        return ChatReply(
            message=message,
            deltas=tuple(deltas),
            finish_reason=finish_reason(message, result.finish),
            prompt_tokens=self.turn.call.prompt_tokens,
            result=result,
            thought_tokens=thoughts,
        )


async def answer(
    request: web.Request,
    asked: Sequence[tuple[Session, ChatRequest]],
    api: Api,
    *,
    unread: Iterable[Unread],
    key: Hashable,
    repeated: bool,
) -> web.StreamResponse:
    """Generate the turns that a client requests, one turn for each choice, and answer;
    the answer names the `unread` fields. Raises RequestError.
    """
    headers = ignored(unread)
    try:
        async with contextlib.AsyncExitStack() as stack:
            choices = [
                _Choice(
                    session,
                    await stack.enter_async_context(session.turn(chat, key, repeated=repeated)),
                    chat,
                )
                for session, chat in asked
            ]
            if asked[0][1].stream:
                return await _stream(request, choices, api, headers)
            return await _complete(request, choices, api, headers)
    except TooLongError as error:
        if not asked[0][1].stream:
            raise
        return await _failed(request, api, asked[0][1], error)


def ignored(unread: Iterable[Unread]) -> dict[str, str]:
    """Return the header that tells a client which fields were ignored."""
    names = ", ".join(dict.fromkeys(shown(field.recorded().field) for field in unread))
    return {IGNORED: names.encode("ascii", "replace").decode()[:MOST_IGNORED]} if names else {}


async def _failed(
    request: web.Request, api: Api, chat: ChatRequest, error: TooLongError
) -> web.StreamResponse:
    """Answer with a stream of the error if the API's clients read errors from streams.
    Otherwise raise the error.
    """
    head = ReplyHead(id=f"{api.prefix}-failed", created=int(time.time()), model=chat.model)
    events = list(api.failed(head, error, chat))
    if not events:
        raise error
    stream = _EventStream(request, api, {})
    await stream.send(events)
    await stream.end()
    return stream.response


async def _complete(
    request: web.Request, choices: Sequence[_Choice], api: Api, headers: Mapping[str, str]
) -> web.StreamResponse:
    for choice in choices:
        await _turn_ended(choice.turn, None)
    results = [_outcome(choice.turn)[0] for choice in choices]
    shown = choices[0].chat.top_logprobs + 1
    tokens = sum(len(result.tokens) + len(result.prompt_logprobs) for result in results)

    def written() -> str:
        bodies = list[Json]()
        for choice, result in zip(choices, results, strict=True):
            deltas: Sequence[TextDelta] = ()
            if choice.chat.logprobs:
                codec = choice.session.codec_of(choice.chat)
                deltas = text_deltas(codec, result, length=choice.turn.shown)
            bodies.append(api.response(choice.head(api), choice.reply(deltas), choice.chat))
        return json.dumps(_together(bodies, [choice.chat.repeats for choice in choices]))

    body = await choices[0].session.beside(written, size=tokens * shown, most=INLINE_TOKENS)
    response = web.json_response(text=body, headers=headers)
    await response.prepare(request)
    await response.write_eof()
    for choice in choices:
        choice.session.deliver(choice.turn)
    return response


async def _stream(
    request: web.Request,
    choices: Sequence[_Choice],
    api: Api,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Stream the replies.

    Status and headers wait for the first text, so that errors before it are plain
    responses, but never longer than clients wait.
    """
    stream = _EventStream(request, api, headers)
    parts = [_Part(stream, index, len(choices)) for index in range(len(choices))]
    sending = [
        asyncio.ensure_future(_send_turn(part, choice, api))
        for part, choice in zip(parts, choices, strict=True)
    ]
    try:
        try:
            await asyncio.gather(*sending)
            usages = [part.usage for part in parts if part.usage is not None]
            if len(choices) > 1 and usages:
                await stream.send([_together(usages, [choice.chat.repeats for choice in choices])])
        except ContradictionError as error:
            text = f"the stream is broken off: {error}"
            await stream.fail(RequestError(503, text, code="stream_broken_off"))
        except RequestError as error:
            await stream.fail(error)
        else:
            await stream.end()
            for choice in choices:
                choice.session.deliver(choice.turn)
    except TimeoutError:
        stream.break_off()
    finally:
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    return stream.response


async def _send_turn(part: "_Part", choice: _Choice, api: Api) -> None:
    """Send all events of the turn. Raises RequestError if the turn fails."""
    session, turn, chat = choice
    events, reader = api.stream(choice.head(api), chat), session.deltas_of(turn, chat)
    while not turn.ended:
        news = turn.news
        await part.send(events.progress(reader.read(turn.tokens, turn.logprobs, turn.tops)))
        if not await _turn_ended(turn, KEEP_ALIVE_S, news) and not news.done():
            await part.keep_alive()
    result, _ = _outcome(turn)
    await part.send(events.rest(choice.reply(reader.finish(result, turn.shown))))


def _together(bodies: Sequence[Json], repeats: Sequence[bool]) -> Json:
    """Return one answer with the choices and the usage of all `bodies`: a prompt counts
    once for all choices that repeat it.
    """
    first = bodies[0]
    if len(bodies) == 1:
        return first
    choices = [choice for body in bodies for choice in body["choices"]]
    usages = [body["usage"] for body in bodies]
    counted = [usage for usage, again in zip(usages, repeats, strict=True) if not again]
    prompt = sum(usage["prompt_tokens"] for usage in counted)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in counted)
    completion = sum(usage["completion_tokens"] for usage in usages)
    details = [usage.get("completion_tokens_details", {}) for usage in usages]
    thoughts = sum(detail.get("reasoning_tokens", 0) for detail in details)
    return {
        **first,
        "choices": [{**choice, "index": index} for index, choice in enumerate(choices)],
        "usage": usage_of(prompt, completion) | details_of(cached, thoughts),
    }


class _Part:
    """One of several choices in a stream: choice number `index`."""

    def __init__(self, stream: "_EventStream", index: int, choices: int) -> None:
        self._stream, self._index, self._choices = stream, index, choices
        self.usage: Json | None = None
        """The last event, if it has only the usage and there are other choices."""

    async def send(self, events: Iterable[Json]) -> None:
        """Send events, if there are any."""
        await self._stream.send(events if self._choices == 1 else self._numbered(events))

    async def keep_alive(self) -> None:
        """Send a comment."""
        await self._stream.keep_alive()

    def _numbered(self, events: Iterable[Json]) -> Iterator[Json]:
        for event in events:
            if event["choices"]:
                numbered = [{**choice, "index": self._index} for choice in event["choices"]]
                yield {**event, "choices": numbered}
            else:
                self.usage = event


class _EventStream:
    """A stream of events in response to one request.

    Everything that is sent raises TimeoutError if the client has not read it within
    `WRITE_S`.
    """

    def __init__(self, request: web.Request, api: Api, headers: Mapping[str, str]) -> None:
        self._request, self._api = request, api
        self._writing = asyncio.Lock()
        own = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self.response = web.StreamResponse(headers={**headers, **own})

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
        async with asyncio.timeout(WRITE_S), self._writing:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(data)
            if last:
                await self.response.write_eof()


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
    request as a retry.

    OpenAI's clients count their retries in a header; others may name a request with an
    idempotency key.
    """
    name = request.headers.get(IDEMPOTENCY_KEY, "")
    tries = request.headers.get("X-Stainless-Retry-Count", "0")
    return (name, xxhash.xxh3_128_digest(body)), bool(name) or tries not in ("", "0")


def errors_of(paths: Mapping[str, Api]) -> Middleware:
    """Return a middleware that turns every failure into an error of the API whose path
    the request has: OpenAI's unless the path ends with one of `paths`.
    """

    @web.middleware
    async def in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionError:
            raise  # the client is gone
        except Exception as error:
            api = next((paths[end] for end in paths if request.path.endswith(end)), None)
            return error_response(request, error, api)

    return in_json


def error_response(request: web.Request, error: Exception, api: Api | None = None) -> web.Response:
    """Return the answer to a request that failed, in the form of `api`, or of OpenAI's
    API if it is not given.
    """
    form: Callable[[RequestError], Json] = RequestError.body if api is None else api.error
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
    return web.json_response(form(refusal), status=refusal.status, headers=headers)
