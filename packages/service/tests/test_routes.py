"""The OpenAPI document describes exactly the existing routes and their answers. Bodies
are decoded: single requests and batches, invalid ones, and ones that are too large, of
which nothing is decoded.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.service.tests.api import call, get, submit
from packages.service.tests.rollout_service import service_config, serving
from rollweave.schema.errors import ConfigError
from rollweave_service import http
from rollweave_service.adapters.prorl import ProRL
from rollweave_service.base import TooLargeError
from rollweave_service.messages import RolloutRequest
from rollweave_service.routes import MAX_VALUES, decode_requests, decoding_failure, document

SERVICE: Any = Mock()
OTHERS = ProRL(SERVICE, codec=SERVICE, hosts=SERVICE).routes()
DOCUMENT = document(http.Api(SERVICE, SERVICE, OTHERS).routes)


def routes() -> set[tuple[str, str]]:
    """Return the method and path of each route of the application that `launch`
    serves.
    """
    app = http.make_app(SERVICE, SERVICE, OTHERS)
    described = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None
    }
    return {(method, path) for method, path in described if method != "HEAD"}


def test_every_route_is_in_the_document_and_no_other() -> None:
    paths = DOCUMENT["paths"]
    assert {
        (method.upper(), path) for path, operations in paths.items() for method in operations
    } == routes()
    names = [
        operation["operationId"]
        for operations in paths.values()
        for operation in operations.values()
    ]
    assert len(names) == len(set(names))


def test_every_reference_has_a_target() -> None:
    encoded = msgspec.json.encode(DOCUMENT).decode()
    names = {part.split('"')[0] for part in encoded.split("#/components/schemas/")[1:]}
    assert names <= set(DOCUMENT["components"]["schemas"])


async def test_answers_conform_to_the_document(tmp_path: Path) -> None:
    described = msgspec.json.decode(msgspec.json.encode(DOCUMENT))
    with serving(service_config(tmp_path)) as service:
        assert await get(service, "/openapi.json") == described
        await submit(service, id="mine")
        await call(service, "GET", "/v1/rollouts/mine?wait=60")
        for method, path in (
            *(("GET", f"/v1/rollouts{rest}") for rest in ("", "/mine")),
            *(("DELETE", f"/v1/{one}/none") for one in ("rollouts", "engines")),
            ("DELETE", "/v1/rollouts/mine"),
            *(("GET", f"/v1/{name}") for name in ("completions", "handlers", "engines")),
            ("GET", "/v1/events?rollout=mine"),
            *(("GET", path) for path in ("/health", "/ready", "/metrics", "/status")),
            *(("POST", path) for path in ("/stop", "/process", "/start", "/cancel")),
            *(("POST", path) for path in ("/add_llm_server", "/clear_llm_server")),
        ):
            at = re.sub(r"/(mine|none)$", "/{id}", path.partition("?")[0])
            status, body, headers = await call(
                service, method, path, {} if method == "POST" else None
            )
            content = described["paths"][at][method.lower()]["responses"][str(status)]["content"]
            kind = headers["Content-Type"].partition(";")[0]
            assert list(content) == [kind], (method, path, status)
            if kind == "application/json":
                jsonschema.validate(
                    body, {**content[kind]["schema"], "components": described["components"]}
                )


# Bodies.


def test_half_a_surrogate_pair_is_named() -> None:
    for body, told in ((rb'"\ud800"', 1), (rb'"\uDFFF', 1), (rb'"\u0041', 0), (b"{", 0)):
        with pytest.raises(msgspec.DecodeError) as raised:
            msgspec.json.decode(body)
        failure = decoding_failure(body, raised.value)
        assert failure.endswith(str(raised.value))
        assert failure.startswith("text must be valid UTF-8, without one half") is bool(told)
    assert decoding_failure(rb'"\ud800"', ValueError("no object")) == "no object"


Json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
Payload = st.dictionaries(st.text(max_size=4), Json, max_size=3)
Requests = st.builds(
    RolloutRequest, handler=st.just("game"), payload=Payload, seed=st.integers(0, 99)
)


@given(st.lists(Requests, min_size=1, max_size=5), st.sampled_from([None, 1]))
def test_decodes_a_batch_in_any_json_layout(
    requests: list[RolloutRequest], indent: int | None
) -> None:
    plain = [msgspec.to_builtins(request) for request in requests]
    for ascii_only in (True, False):
        body = json.dumps({"rollouts": plain}, indent=indent, ensure_ascii=ascii_only).encode(
            errors="replace"
        )
        decoded, several = asyncio.run(decode_requests(body, max_requests=5))
        assert several
        if ascii_only:
            assert decoded == requests
    one = json.dumps(plain[0], indent=indent).encode()
    assert asyncio.run(decode_requests(one, max_requests=1)) == (requests[:1], False)


GAME: dict[str, Any] = {"handler": "game", "index": 1}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"rollouts": []}', "at least one"),
        (b'{"rollouts": [{"handler": "game"}]}', r"rollouts\[0\]"),
        (b'{"rollouts": [{"handler": "game", "index": 1},]}', "must be JSON"),
        (b'{"rollouts": [{"handler": "game", "index": 1}}', "must be JSON"),
        (b'{"rollouts": [{"handler": "game", "index": 1}], "more": 1}', "nothing else, got also"),
        (b'{"rollouts": [' + b"[" * 100_000, "must be JSON"),
        (b'{"rollouts": [NaN]}', "must be JSON"),
        (b'{"rollouts": 1}', "rollouts must be JSON"),
        (
            b'{"handler": "game"}',
            "^the body: a rollout must have either index or payload, got neither$",
        ),
        (b'{"handler": "game", "index": 1, "payload": {}}', "either index or payload, got both$"),
        (b"\xff", "must be JSON"),
        (b'{"handler": "\xff", "index": 1}', "utf-8' codec"),
        (b'{"rollouts": [{"handler": "\xff", "index": 1}]}', r"rollouts\[0\].*utf-8' codec"),
        (b"", "the body must be JSON"),
    ],
)
async def test_refuses_invalid_requests(body: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await decode_requests(body, max_requests=10)


@pytest.mark.parametrize("count", [11, 250_000, 400_000])
async def test_refuses_too_many_requests_before_decoding_them(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[RolloutRequest] = []
    original = RolloutRequest.__post_init__
    monkeypatch.setattr(
        RolloutRequest, "__post_init__", lambda self: (created.append(self), original(self))[1]
    )
    body = b'{"rollouts": [' + b", ".join([json.dumps(GAME).encode()] * count) + b"]}"
    with pytest.raises(TooLargeError, match="at most"):
        await decode_requests(body, max_requests=10)
    assert not created


async def test_refuses_a_body_with_too_many_json_values() -> None:
    body = b'{"handler": "game", "payload": {"x": [' + b"[],[]," * MAX_VALUES + b"[]]}}"
    with pytest.raises(TooLargeError, match="values"):
        await decode_requests(body, max_requests=10)
