"""Decoding of request bodies: single requests and batches, invalid ones, and ones that
are too large, of which nothing is decoded.
"""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.schema.errors import ConfigError
from rollweave.schema.service import RolloutRequest
from rollweave.service.base import TooLargeError
from rollweave.service.routes import MAX_VALUES, decode_requests

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
