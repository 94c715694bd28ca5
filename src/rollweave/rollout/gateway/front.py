"""The serving front: OpenAI's APIs in front of one engine, for clients that are not
part of a training run.

Each request is a separate session: nothing is recorded beyond its answer. The APIs,
their errors and their streams are the gateway's (`answering.py`).

Invariants: a request that the engine refuses is the client's error (400); a lost engine
is the server's error (503); the number of requests in flight is bounded by the engine's
server (429), and requests are cancelled when their connections close.
"""

import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from rollweave.engine.clients.base import OnTokens
from rollweave.engine.clients.server import EngineServer
from rollweave.engine.clients.serving_metrics import Outcome
from rollweave.io.http.bodies import body_of
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.answering import (
    add_apis,
    answer,
    apis,
    error_response,
    ignored,
    model_object,
)
from rollweave.rollout.gateway.fields import RequestError, Unread, bad
from rollweave.rollout.gateway.preparing import MOST, Aside, template_errors
from rollweave.rollout.gateway.requests import ChatRequest, PromptForm
from rollweave.rollout.gateway.responses import Api, Json
from rollweave.rollout.gateway.served import parse_detokenize, parse_tokenize
from rollweave.rollout.gateway.sessions import Session, SessionLimits
from rollweave.schema.errors import EngineError, EngineLostError
from rollweave.schema.serving import GenerateRequest, GenerateResult, Sampling, VersionSpan

REQUEST_BYTES: Final = 64 << 20
"""Maximum bytes of a request: a prompt of a million token ids takes a tenth of it."""

TURN_S: Final = 3600.0
"""Maximum seconds of one request, including its waiting."""

REPORT_S: Final = 0.0
"""Seconds between two reports of the tokens of a stream: each step is reported."""


_log = logging.getLogger(__name__)


class ServingFront:
    """The handlers of one engine's clients. `context` is the engine's maximum number of
    tokens in a sequence. `tokenizer` is the tokenizer's description in the checkpoint.
    """

    def __init__(
        self,
        server: EngineServer,
        codec: TextCodec,
        *,
        context: int,
        tokenizer: Mapping[str, Any] | None = None,
    ) -> None:
        self._server, self._codec, self._context = server, codec, context
        self._tokenizer, self._aside = dict(tokenizer or {}), Aside()
        self._limits = SessionLimits(
            context=context, turn_tokens=context, tokens=context, turn_s=TURN_S
        )
        self._started = int(time.time())
        self._said: set[str] = set()
        """The ignored fields of requests that have been logged."""

    def add_to(self, app: web.Application) -> None:
        """Add the routes to the application of the engine's server."""
        add_apis(
            app,
            "/v1",
            apis(self._codec, served=True),
            answer=self._answer,
            count=self._count,
            model=self._model_object,
        )
        for path, ask in (("/tokenize", self._tokenize), ("/detokenize", self._detokenize)):
            app.router.add_post(path, functools.partial(self._ask, ask=ask))
        app.router.add_get("/tokenizer_info", self._tokenizer_info)

        async def end(_: web.Application) -> None:
            self._aside.close()

        app.on_cleanup.append(end)

    def _model_object(self, request: web.Request, name: str) -> Json:
        del request
        root = self._server.model
        return model_object(name or root, root=root, created=self._started, context=self._context)

    async def _answer(self, request: web.Request, api: Api) -> web.StreamResponse:
        with self._server.metrics.request() as outcome:
            try:
                body = await body_of(request, most=REQUEST_BYTES)
                chat = await self._aside.run(lambda: api.parse(body), size=len(body))
                if not self._server.has_room(1 + len(chat.others)):
                    rule = "requests in flight must be fewer: the engine is busy"
                    raise RequestError(429, rule, code="rate_limit_exceeded")
                asked, unread = await self._aside.run(
                    lambda: self._asked(chat, outcome), size=len(body)
                )
                self._say_ignored(unread)
                response = await answer(
                    request,
                    asked,
                    api,
                    unread=unread,
                    key="",
                    repeated=False,
                )
            except ConnectionError:
                raise  # the client is gone
            except Exception as error:
                refusal = error_response(request, error, api)
                outcome.name = "refused" if refusal.status < 500 else "failed"
                return refusal
            outcome.name = "answered" if outcome.sampled else "failed"
            return response

    def _say_ignored(self, unread: Iterable[Unread]) -> None:
        """Log each ignored field the first time that it is ignored."""
        for field in unread:
            ignored = field.recorded()
            if ignored.field not in self._said and len(self._said) < MOST:
                self._said.add(ignored.field)
                _log.warning("%s: %s = %s", ignored.action, ignored.field, ignored.value)

    def _asked(
        self, chat: ChatRequest, outcome: Outcome
    ) -> tuple[list[tuple[Session, ChatRequest]], list[Unread]]:
        """Return the session of each choice, with the choice as the model is shown it
        and the tokens of its prompt; and the fields that are ignored. Raises
        RequestError.
        """
        asked, unread = list[tuple[Session, ChatRequest]](), list[Unread]()
        readable = chat
        for choice in (chat, *chat.others):
            session = self._session(choice, outcome)
            if not choice.repeats:
                readable, left = self._readable(session, choice)
                unread += left
            same = {"seed": choice.seed, "repeats": choice.repeats}
            asked.append((session, msgspec.structs.replace(readable, **same)))
        return asked, unread

    def _readable(self, session: Session, chat: ChatRequest) -> tuple[ChatRequest, list[Unread]]:
        """Return a request as the model is shown it, and the fields that are ignored.
        It has the tokens of its prompt unless the prompt is messages in their usual
        form. Raises RequestError.
        """
        chat, unread = session.readable(chat)
        session.check(chat)
        named = {"prompt": self._prompt(chat), "model": chat.model or self._server.model}
        return msgspec.structs.replace(chat, **named), unread

    def _prompt(self, chat: ChatRequest) -> tuple[int, ...] | None:
        """Return the tokens of a prompt; None for messages in their usual form. Raises
        RequestError.
        """
        form, tokens = chat.prompt_form, chat.prompt
        if tokens is None and form == PromptForm():
            return None
        with template_errors(chat.source):
            if tokens is None:
                codec = self._codec.with_arguments(chat.template_arguments)
                tokens = codec.start(
                    chat.messages,
                    chat.tools,
                    prompt=form.opens_turn,
                    continues=form.continues_last,
                )
                if form.adds_special:
                    tokens = self._codec.added_before() + tokens
            elif isinstance(tokens, str):
                tokens = self._codec.encode_literal(tokens, adds_special=form.adds_special)
        if form.most is None:
            return tokens
        most = form.most
        if most < 0:
            most = self._context - (chat.max_tokens or 1)
        if most < 1:
            raise bad("truncate_prompt_tokens", "must leave a token of the prompt", form.most)
        return tokens[:most] if form.keeps_first else tokens[-most:]

    async def _ask(
        self,
        request: web.Request,
        ask: Callable[[bytes], tuple[Json, Iterable[Unread]]],
        api: Api | None = None,
    ) -> web.Response:
        """Answer a request that needs no turn: `ask` returns the answer to its body,
        and the fields that are ignored.
        """
        try:
            body = await body_of(request, most=REQUEST_BYTES)
            fields, unread = await self._aside.run(lambda: ask(body), size=len(body))
        except ConnectionError:
            raise  # the client is gone
        except Exception as error:
            return error_response(request, error, api)
        self._say_ignored(unread)
        return web.json_response(fields, headers=ignored(unread))

    async def _count(self, request: web.Request, api: Api) -> web.Response:
        def ask(body: bytes) -> tuple[Json, Iterable[Unread]]:
            tokens, unread = self._tokens_of(api.parse(body, counts=True))
            return api.count(len(tokens)), unread

        return await self._ask(request, ask, api)

    def _tokens_of(self, chat: ChatRequest) -> tuple[tuple[int, ...], list[Unread]]:
        """Return the tokens of a request's prompt, and the fields that are ignored.
        Raises RequestError.
        """
        session = self._session(chat, Outcome())
        chat, unread = self._readable(session, chat)
        tokens = session.prompt_of(chat) if chat.prompt is None else chat.prompt
        assert not isinstance(tokens, str), "a text was encoded"
        return tokens, unread

    def _tokenize(self, body: bytes) -> tuple[Json, Iterable[Unread]]:
        chat, wants_names = parse_tokenize(body, self._codec)
        tokens, unread = self._tokens_of(chat)
        shown = {
            "count": len(tokens),
            "max_model_len": self._context,
            "tokens": tokens,
            "token_strs": self._codec.names(tokens) if wants_names else None,
        }
        return shown, unread

    def _detokenize(self, body: bytes) -> tuple[Json, Iterable[Unread]]:
        tokens, unread = parse_detokenize(body)
        return {"prompt": self._codec.decode(tokens)}, unread

    async def _tokenizer_info(self, _: web.Request) -> web.Response:
        return web.json_response(self._tokenizer)

    def _session(self, chat: ChatRequest, outcome: Outcome) -> Session:
        async def generate(
            session: str,
            tokens: tuple[int, ...],
            sampling: Sampling,
            on_tokens: OnTokens | None,
        ) -> GenerateResult:
            top = 0 if chat.logprob_ids else chat.top_logprobs
            asked = GenerateRequest(
                id=session,
                tokens=tokens,
                sampling=sampling,
                prompt_logprobs=chat.prompt_logprobs or (chat.echo and chat.logprobs),
                top_logprobs=max(top, chat.prompt_top),
                logprob_ids=chat.logprob_ids,
            )
            result = await self._generate(asked, on_tokens)
            outcome.sampled = True
            return result

        id = secrets.token_hex(16)
        return Session(
            id,
            call_prefix=id,  # a client's conversation is many sessions
            codec=self._codec,
            tools=self._codec.tool_format,
            generate=generate,
            limits=self._limits,
            sampling=Sampling(seed=secrets.randbits(63)),
            pinned=False,
            aside=self._aside,
        )

    async def _generate(
        self, request: GenerateRequest, on_tokens: OnTokens | None
    ) -> GenerateResult:
        try:
            result = await self._server.generate(request, on_tokens, report_s=REPORT_S)
        except EngineLostError:
            raise
        except EngineError as error:  # the engine refuses the request
            raise RequestError(400, str(error).removeprefix("ValueError: ")) from error
        except web.HTTPTooManyRequests as error:
            raise RequestError(429, error.reason, code="rate_limit_exceeded") from error
        return msgspec.structs.replace(result, versions=_known(result.versions))


def _known(versions: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Return the versions as a client sees them: the checkpoint's own weights are
    version 0.
    """
    return tuple(msgspec.structs.replace(span, version=max(0, span.version)) for span in versions)
