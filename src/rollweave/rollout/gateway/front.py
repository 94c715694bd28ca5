"""The serving front: OpenAI's APIs in front of one engine, for clients that are no part
of a training run.

Each request is a separate session: nothing is recorded beyond its answer. The APIs,
their errors and their streams are those of the gateway (`answering.py`).

Invariants: a request that the engine refuses is the client's error (400); a lost
engine is the server's (503); the number of requests in flight is bounded by the
engine's server (429), and cancelled with their connections.
"""

import functools
import secrets
from collections.abc import Sequence
from typing import Final

import msgspec
from aiohttp import web

from rollweave.engine.clients.base import OnTokens
from rollweave.engine.clients.server import EngineServer
from rollweave.engine.clients.serving_metrics import Outcome
from rollweave.io.http.bodies import body_of
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.answering import KEEP_ALIVE_S, answer, error_response
from rollweave.rollout.gateway.apis import apis
from rollweave.rollout.gateway.aside import Aside
from rollweave.rollout.gateway.refusals import RequestError
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.rollout.gateway.responses import Api
from rollweave.rollout.gateway.sessions import Session, SessionLimits
from rollweave.schema.errors import EngineError, EngineLostError
from rollweave.schema.serving import GenerateRequest, GenerateResult, Sampling, VersionSpan

REQUEST_BYTES: Final = 64 << 20
"""Maximum bytes of a request: a prompt of a million token ids takes a tenth."""

TURN_S: Final = 3600.0
"""Maximum seconds of one request, its waiting included."""

REPORT_S: Final = 0.0
"""Seconds between two reports of the tokens of a stream: each step is reported."""


class ServingFront:
    """The handlers of one engine's clients. `context` is the engine's maximum number of
    tokens in a sequence.
    """

    def __init__(self, server: EngineServer, codec: TextCodec, *, context: int) -> None:
        self._server, self._codec = server, codec
        self._aside = Aside()
        self._limits = SessionLimits(
            context=context, turn_tokens=context, tokens=context, turn_s=TURN_S
        )

    def add_to(self, app: web.Application) -> None:
        """Add the routes to the application of the engine's server."""
        for path, api in apis(self._codec, scores_prompts=True).items():
            app.router.add_post("/v1" + path, functools.partial(self._answer, api=api))

        async def end(_: web.Application) -> None:
            self._aside.close()

        app.on_cleanup.append(end)

    async def _answer(self, request: web.Request, api: Api) -> web.StreamResponse:
        with self._server.metrics.request() as outcome:
            try:
                body = await body_of(request, most=REQUEST_BYTES)
                chat = await self._aside.run(lambda: api.parse(body), size=len(body))
                if self._server.is_full:
                    rule = "requests in flight must be fewer: the engine is busy"
                    raise RequestError(429, rule, code="rate_limit_exceeded")
                session = self._session(chat, outcome)
                response = await answer(
                    request,
                    session,
                    api,
                    chat,
                    key=session.id,
                    repeated=False,
                    keep_alive_s=KEEP_ALIVE_S,
                )
            except ConnectionError:
                raise  # the client is gone
            except Exception as error:
                refusal = error_response(request, error, api)
                outcome.name = "refused" if refusal.status < 500 else "failed"
                return refusal
            outcome.name = "answered" if outcome.sampled else "failed"
            return response

    def _session(self, chat: ChatRequest, outcome: Outcome) -> Session:
        async def generate(
            session: str,
            tokens: tuple[int, ...],
            sampling: Sampling,
            on_tokens: OnTokens | None,
        ) -> GenerateResult:
            asked = GenerateRequest(
                id=session,
                tokens=tokens,
                sampling=sampling,
                prompt_logprobs=chat.prompt_logprobs,
            )
            result = await self._generate(asked, on_tokens)
            outcome.sampled = True
            return result

        return Session(
            secrets.token_hex(16),
            codec=self._codec,
            tools=self._codec.tool_format,
            generate=generate,
            limits=self._limits,
            sampling=Sampling(seed=secrets.randbits(63)),
            pinned=False,
            aside=self._aside,
            no_images="Rollweave's own engine computes text only",
        )

    async def _generate(
        self, request: GenerateRequest, on_tokens: OnTokens | None
    ) -> GenerateResult:
        try:
            result = await self._server.generate(request, on_tokens, report_s=REPORT_S)
        except EngineLostError:
            raise
        except EngineError as error:  # the engine refuses what was asked
            raise RequestError(400, str(error).removeprefix("ValueError: ")) from error
        except web.HTTPTooManyRequests as error:
            raise RequestError(429, error.reason, code="rate_limit_exceeded") from error
        return msgspec.structs.replace(result, versions=_known(result.versions))


def _known(versions: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Return the versions as a client sees them: the checkpoint's own weights are
    version 0.
    """
    return tuple(msgspec.structs.replace(span, version=max(0, span.version)) for span in versions)
