"""Golden requests and answers of every dialect, in the formats of vLLM 0.32, SGLang
0.5.23 and ProRL's public clients.
"""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.engine.clients.dialects import (
    Completions,
    Dialect,
    Prorl,
    Rollweave,
    Sglang,
    Vllm,
    check,
)
from rollweave.engine.clients.responses import ResponseError
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Sampling,
    VersionSpan,
)

SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=3, stop_token_ids=(2,), seed=11)
REQUEST = GenerateRequest(id="ab12", tokens=(5, 6, 7), sampling=SAMPLING, rank=2.0, budget_s=9.0)
SPEECH = GenerateRequest(
    id="ab12", tokens=(5, 6, 7), sampling=Sampling(max_tokens=3, stop=("END",), allowed=(8, 9))
)

VLLM_SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "max_tokens": 3,
    "seed": 11,
    "stop": [],
    "stop_token_ids": [2],
    "allowed_token_ids": None,
    "logprobs": 0,
}
VLLM_ANSWER = {
    "request_id": "generate-tokens-ab12",
    "model": "m",
    "created": 1,
    "output_mode": "tokens",
    "prompt_logprobs": None,
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    },
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": 2,
            "token_ids": [9, 2],
            "routed_experts": None,
            "weight_versions": [
                {"version": "7", "start": 0, "end": 1},
                {"version": "8", "start": 1, "end": 2},
            ],
            "logprobs": {
                "content": [
                    {"token_id": 9, "logprob": -0.5, "rank": 1, "top_logprobs": []},
                    {"token_id": 2, "logprob": -0.25, "rank": 1, "top_logprobs": []},
                ]
            },
        }
    ],
}
COMPLETION_ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": None,
    },
    "choices": [
        {
            "index": 0,
            "text": "hi",
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [9, 8],
            "prompt_token_ids": [5, 6, 7],
            "logprobs": {
                "text_offset": [0, 10],
                "token_logprobs": [-0.5, -0.25],
                "tokens": ["token_id:9", "token_id:8"],
                "top_logprobs": [{"token_id:9": -0.5}, {"token_id:8": -0.25}],
            },
        }
    ],
}
SGLANG_ANSWER = {
    "text": "hi",
    "output_ids": [9, 2],
    "meta_info": {
        "id": "ab12",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "weight_version": "12",
        "completion_tokens": 2,
        "cached_tokens": 1,
        "output_token_logprobs": [[-0.5, 9, None], [-0.25, 2, None]],
        "e2e_latency": 0.1,
    },
}
PRORL_ANSWER = {"response_ids": [9, 2], "logprobs": [-0.5, -0.25]}
TWO = (VersionSpan(start=0, end=1, version=7), VersionSpan(start=1, end=2, version=8))


def encoded(dialect: Dialect, request: GenerateRequest = REQUEST) -> Any:
    return json.loads(dialect.encode(request))


def decoded(dialect: Dialect, answer: object, request: GenerateRequest = REQUEST) -> GenerateResult:
    result = dialect.decode(request, json.dumps(answer).encode())
    check(request, result, vocab=10)
    return result


def one_version(version: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(start=0, end=2, version=version),)


def changed(answer: Any, *path: str | int, to: object) -> Any:
    """Return a copy of `answer` with the value at `path` replaced."""
    copy = json.loads(json.dumps(answer))
    place = copy
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return copy


# Requests.


def test_vllm_receives_every_parameter() -> None:
    assert encoded(Vllm("m")) == {
        "request_id": "ab12",
        "model": "m",
        "token_ids": [5, 6, 7],
        "sampling_params": VLLM_SAMPLING,
        "stream": False,
    }
    assert encoded(Vllm(), SPEECH)["sampling_params"]["allowed_token_ids"] == [8, 9]
    assert encoded(Vllm(), SPEECH)["sampling_params"]["stop"] == ["END"]
    path, body = Vllm().abort("ab12") or ("", b"")
    expected = ("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-ab12"]})
    assert (path, json.loads(body)) == expected


def test_completions_ask_for_token_ids() -> None:
    body = {
        **VLLM_SAMPLING,
        "prompt": [5, 6, 7],
        "model": "m",
        "n": 1,
        "stream": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    assert encoded(Completions("m")) == body
    assert "model" not in encoded(Completions())
    assert Completions().abort("ab12") is None


def test_sglang_receives_every_parameter() -> None:
    params = {
        name: value
        for name, value in VLLM_SAMPLING.items()
        if name not in ("seed", "max_tokens", "allowed_token_ids")
    }
    del params["logprobs"]
    assert encoded(Sglang()) == {
        "rid": "ab12",
        "input_ids": [5, 6, 7],
        "return_logprob": True,
        "stream": False,
        "sampling_params": {**params, "max_new_tokens": 3, "sampling_seed": 11},
    }
    plain = GenerateRequest(id="x", tokens=(1,))
    assert encoded(Sglang(), plain)["sampling_params"]["top_k"] == -1
    path, body = Sglang().abort("ab12") or ("", b"")
    assert (path, json.loads(body)) == ("/abort_request", {"rid": "ab12"})


def test_prorl_request_matches_its_clients() -> None:
    body = {
        "prompt_ids": [5, 6, 7],
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 11,
        "max_tokens": 3,
        "top_k": 5,
    }
    assert encoded(Prorl()) == body
    assert "top_k" not in encoded(Prorl(), GenerateRequest(id="x", tokens=(1,)))


def test_rollweave_sends_the_request_itself() -> None:
    assert msgspec.json.decode(Rollweave().encode(SPEECH), type=GenerateRequest) == SPEECH


@pytest.mark.parametrize(
    ("speaker", "field"), [(Sglang(), "allowed"), (Prorl(), "allowed"), (Prorl(), "stop")]
)
def test_unsupported_parameters_are_refused(speaker: Dialect, field: str) -> None:
    values = {"allowed": (8,)} if field == "allowed" else {"stop": ("END",)}
    request = GenerateRequest(
        id="x", tokens=(1,), sampling=msgspec.convert({"max_tokens": 2, **values}, Sampling)
    )
    with pytest.raises(EngineError, match=rf"sampling\.{field} cannot be expressed"):
        speaker.encode(request)


@given(st.integers(-(1 << 70), 1 << 70))
def test_any_seed_fits(seed: int) -> None:
    request = GenerateRequest(id="x", tokens=(1,), sampling=Sampling(seed=seed))
    for speaker in (Vllm(), Completions(), Sglang(), Prorl()):
        body = encoded(speaker, request)
        sent = body.get(
            "seed",
            body.get("sampling_params", {}).get(
                "seed", body.get("sampling_params", {}).get("sampling_seed")
            ),
        )
        assert 0 <= sent < 1 << 63


# What is answered.


def test_vllm_answers_with_versions_and_cache() -> None:
    result = decoded(Vllm(), VLLM_ANSWER)
    assert (result.id, result.tokens, result.logprobs) == ("ab12", (9, 2), (-0.5, -0.25))
    assert (result.versions, result.finish, result.cached_tokens) == (TWO, FinishReason.STOP, 2)
    named = changed(
        VLLM_ANSWER,
        "choices",
        0,
        "weight_versions",
        to=[{"version": "step-7", "start": 0, "end": 2}],
    )
    assert decoded(Vllm(), named).versions == one_version(0)
    assert decoded(
        Vllm(), changed(VLLM_ANSWER, "choices", 0, "weight_versions", to=None)
    ).versions == one_version(0)


def test_completions_answer() -> None:
    result = decoded(Completions(), COMPLETION_ANSWER)
    expected = ((9, 8), (-0.5, -0.25), FinishReason.LENGTH)
    assert (result.tokens, result.logprobs, result.finish) == expected
    assert result.versions == one_version(0)


def test_sglang_answers_with_its_version() -> None:
    result = decoded(Sglang(), SGLANG_ANSWER)
    assert (result.tokens, result.logprobs) == ((9, 2), (-0.5, -0.25))
    assert result.versions == one_version(12)
    assert result.finish == FinishReason.STOP
    assert result.cached_tokens == 1
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    assert (
        decoded(Sglang(), changed(SGLANG_ANSWER, "meta_info", "weight_versions", to=spans)).versions
        == TWO
    )
    assert decoded(
        Sglang(), changed(SGLANG_ANSWER, "meta_info", "weight_version", to="default")
    ).versions == one_version(0)


def test_sglang_aborts_before_and_in_the_middle() -> None:
    stopped = changed(
        SGLANG_ANSWER, "meta_info", "finish_reason", to={"type": "abort", "message": "Aborted"}
    )
    assert decoded(Sglang(), stopped).finish is FinishReason.ABORTED
    early = {
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "1"},
    }
    assert decoded(Sglang(), early).tokens == ()


def test_prorl_is_cut_after_the_first_stop_token() -> None:
    assert decoded(Prorl(), PRORL_ANSWER).finish is FinishReason.STOP
    long = {"response_ids": [9, 2, 4], "logprobs": [-0.5, -0.25, -0.1]}
    result = decoded(Prorl(), long)
    expected = ((9, 2), (-0.5, -0.25), FinishReason.STOP)
    assert (result.tokens, result.logprobs, result.finish) == expected
    full = {"response_ids": [9, 8, 4], "logprobs": [-0.5, -0.25, -0.1]}
    assert decoded(Prorl(), full).finish is FinishReason.LENGTH


def test_rollweave_returns_the_result_itself() -> None:
    result = GenerateResult(
        id="ab12",
        tokens=(9, 2),
        logprobs=(-0.1, -1 / 3),
        versions=TWO,
        finish=FinishReason.STOP,
        queue_s=0.1,
    )
    assert Rollweave().decode(REQUEST, msgspec.json.encode(result)) == result
    unversioned = msgspec.structs.replace(result, versions=one_version(-1))
    assert Rollweave().decode(REQUEST, msgspec.json.encode(unversioned)).versions == one_version(0)


CHOICE = ("choices", 0)
BROKEN = [
    (Vllm(), changed(VLLM_ANSWER, *CHOICE, "token_ids", to=None), "no choices.0..token_ids"),
    (Vllm(), changed(VLLM_ANSWER, *CHOICE, "logprobs", to=None), "no choices.0..logprobs"),
    (Vllm(), changed(VLLM_ANSWER, *CHOICE, "token_ids", to=[9]), "other tokens"),
    (Vllm(), changed(VLLM_ANSWER, *CHOICE, "token_ids", to=[9, 3]), "other tokens"),
    (Vllm(), changed(VLLM_ANSWER, *CHOICE, "finish_reason", to="tired"), "finish reason must be"),
    (Vllm(), changed(VLLM_ANSWER, *CHOICE, "finish_reason", to=None), "finish reason must be"),
    (Vllm(), changed(VLLM_ANSWER, "choices", to=[]), "1 choice, got 0"),
    (Vllm(), changed(VLLM_ANSWER, "choices", to=VLLM_ANSWER["choices"] * 2), "1 choice, got 2"),  # type: ignore[operator]
    (
        Vllm(),
        changed(VLLM_ANSWER, *CHOICE, "logprobs", "content", 1, "logprob", to=-9999.0),
        "log-prob of its token 1",
    ),
    (
        Vllm(),
        changed(VLLM_ANSWER, *CHOICE, "logprobs", "content", 1, "logprob", to=0.5),
        "log-prob of its token 1",
    ),
    (
        Vllm(),
        changed(VLLM_ANSWER, *CHOICE, "weight_versions", 1, "start", to=0),
        "must cover its 2 tokens in order",
    ),
    (
        Vllm(),
        changed(VLLM_ANSWER, *CHOICE, "weight_versions", 1, "end", to=3),
        "must cover its 2 tokens in order",
    ),
    (Vllm(), changed(VLLM_ANSWER, *CHOICE, "token_ids", to=["9", 2]), "Expected `int`"),
    (Vllm(), {"error": {"message": "no"}}, "required field `choices`"),
    (Vllm(), "yes", "Expected `object`"),
    (
        Completions(),
        changed(COMPLETION_ANSWER, *CHOICE, "token_ids", to=None),
        "no choices.0..token_ids",
    ),
    (
        Completions(),
        changed(COMPLETION_ANSWER, *CHOICE, "logprobs", to=None),
        "no choices.0..logprobs",
    ),
    (
        Completions(),
        changed(COMPLETION_ANSWER, *CHOICE, "logprobs", "token_logprobs", to=[-1]),
        "1 log-probs for 2",
    ),
    (
        Completions(),
        changed(COMPLETION_ANSWER, *CHOICE, "logprobs", "token_logprobs", to=[-1, None]),
        "Expected `float`",
    ),
    (
        Completions(),
        changed(COMPLETION_ANSWER, *CHOICE, "token_ids", to=[9, 10]),
        r"must be in \[0, 10\), got 9 to 10",
    ),
    (
        Completions(),
        changed(COMPLETION_ANSWER, *CHOICE, "token_ids", to=[9, -1]),
        r"must be in \[0, 10\), got -1 to 9",
    ),
    (Sglang(), changed(SGLANG_ANSWER, "output_ids", to=[9]), "other tokens"),
    (
        Sglang(),
        changed(SGLANG_ANSWER, "meta_info", "output_token_logprobs", to=None),
        "no meta_info",
    ),
    (
        Sglang(),
        changed(SGLANG_ANSWER, "meta_info", "finish_reason", to=None),
        "finish reason must be",
    ),
    (Prorl(), {"response_ids": [9, 2], "logprobs": [-0.5]}, "1 log-probs for 2 tokens"),
    (Prorl(), {"response_ids": [], "logprobs": []}, "no token"),
    (
        Prorl(),
        {"response_ids": [9, 8, 7, 6], "logprobs": [-1, -1, -1, -1]},
        "4 tokens, max_tokens is 3",
    ),
    (Prorl(), {"response_ids": [9, 2], "logprobs": [float("nan"), -1]}, "cannot be read"),
    (Prorl(), {"response_ids": [9, 2], "logprobs": [float("-inf"), -1]}, "cannot be read"),
    (Prorl(), {"response_ids": "text"}, "Expected `array`"),
]


@pytest.mark.parametrize(("speaker", "answer", "reason"), BROKEN)
def test_malformed_answers_raise_with_the_reason(
    speaker: Dialect, answer: object, reason: str
) -> None:
    with pytest.raises(ResponseError, match=reason):
        decoded(speaker, answer)


@given(
    st.sampled_from([Vllm(), Completions(), Sglang(), Prorl(), Rollweave()]), st.binary(max_size=60)
)
def test_arbitrary_bytes_raise_response_errors(speaker: Dialect, body: bytes) -> None:
    with pytest.raises(ResponseError):
        speaker.decode(REQUEST, body)
