"""The APIs that clients may use, by their paths, and the routes of a server that offers
them.
"""

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from aiohttp import web

from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.anthropic_messages import MessagesApi
from rollweave.rollout.gateway.completions import CompletionsApi
from rollweave.rollout.gateway.openai_responses import ResponsesApi
from rollweave.rollout.gateway.refusals import RequestError
from rollweave.rollout.gateway.responses import Api, BatchApi, ChatApi, Json

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
