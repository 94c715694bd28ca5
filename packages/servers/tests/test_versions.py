"""The dialects of our own servers: what is sent, and which versions are believed."""

import base64
import io
import json
from typing import Any

import msgspec
import numpy
import pytest

from rollweave.engine.clients.responses import ResponseError
from rollweave.schema.serving import GenerateRequest, Sampling, VersionSpan
from rollweave.schema.work import Routes
from rollweave_servers.sglang import OwnSglang
from rollweave_servers.versions import MAX_SENT
from rollweave_servers.vllm import OwnVllm

Own = OwnVllm | OwnSglang
KINDS = ("vllm", "sglang")


def own(kind: str = "vllm", *, version: int = -1) -> Own:
    if kind == "vllm":
        return OwnVllm(version=version, stop_ids=(0, 7))
    return OwnSglang(version=version, stop_ids=(0, 7), max_context=16)


def request(
    id: str = "r0", *, prompt: int = 2, count: int = 8, rank: float = 0.0, **sampling: Any
) -> GenerateRequest:
    asked = Sampling(stop_token_ids=(7,), seed=3, max_tokens=count, **sampling)
    return GenerateRequest(id=id, tokens=(1,) * prompt, sampling=asked, rank=rank)


def sent(dialect: Own, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(dialect.encode(request(**fields)))
    return body


def answer(kind: str, *spans: tuple[str, int, int], versions: bool = True) -> bytes:
    count = spans[-1][2]
    named = [{"version": v, "start": a, "end": b} for v, a, b in spans] if versions else None
    if kind == "vllm":
        choice = {
            "finish_reason": "stop",
            "token_ids": [5] * count,
            "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}] * count},
            "weight_versions": named,
        }
        return json.dumps({"choices": [choice]}).encode()
    meta = {
        "finish_reason": {"type": "stop", "matched": 7},
        "weight_version": spans[-1][0],
        "output_token_logprobs": [(-1.0, 5, None)] * count,
        "weight_versions": named,
    }
    return json.dumps({"text": "", "output_ids": [5] * count, "meta_info": meta}).encode()


@pytest.mark.parametrize(("kind", "sign"), [("vllm", -1), ("sglang", 1)])
def test_a_higher_rank_comes_first_and_stop_tokens_are_ours(kind: str, sign: int) -> None:
    first, second = sent(own(kind), rank=-3.25), sent(own(kind), rank=-3.5)
    assert sign * first["priority"] > sign * second["priority"]
    params = first["sampling_params"]
    assert params["stop_token_ids"] == [0, 7]
    # SGLang would then ignore stop tokens, too
    assert params.get("ignore_eos") is (True if kind == "vllm" else None)
    if kind == "vllm":
        assert params["detokenize"] is False
        assert sent(own(), stop=("x",))["sampling_params"]["detokenize"] is True


def test_no_sequence_of_sglang_exceeds_the_context() -> None:
    for count, most in ((8, 6), (4, 4)):
        params = sent(own("sglang"), count=count, prompt=10)["sampling_params"]
        assert params["max_new_tokens"] == most


@pytest.mark.parametrize(("kind", "field"), [("vllm", "cache_salt"), ("sglang", "extra_key")])
def test_requests_of_different_weights_never_share_a_prefix(kind: str, field: str) -> None:
    dialect = own(kind)
    keys = [sent(dialect).get(field)]
    for version, publication_id in ((1, 1), (2, 2), (1, 3)):  # a trainer came back at last
        dialect.changed(version, publication_id)
        keys.append(sent(dialect)[field])
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("kind", KINDS)
def test_versions_since_the_request_are_believed_in_their_order(kind: str) -> None:
    dialect = own(kind)
    dialect.changed(1, 1)
    dialect.encode(request())
    dialect.changed(2, 2)
    result = dialect.decode(request(), answer(kind, ("1", 0, 2), ("2", 2, 3)))
    expected = (VersionSpan(start=0, end=2, version=1), VersionSpan(start=2, end=3, version=2))
    assert result.versions == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "spans",
    [
        [("3", 0, 3)],  # never loaded
        [("default", 0, 3)],  # before the request
        [("1", 0, 1), ("2", 1, 2), ("1", 2, 3)],  # backwards
    ],
)
def test_other_versions_are_refused(kind: str, spans: list[tuple[str, int, int]]) -> None:
    dialect = own(kind)
    dialect.changed(1, 1)
    dialect.encode(request())
    dialect.changed(2, 2)
    with pytest.raises(ResponseError, match="which it has not had since the request was sent"):
        dialect.decode(request(), answer(kind, *spans))


def test_the_label_of_an_answer_alone_is_not_believed() -> None:
    """It is that of the moment at which the answer was sent."""
    dialect = own("sglang", version=1)
    dialect.encode(request())
    with pytest.raises(ResponseError, match=r"no meta_info\.weight_versions"):
        dialect.decode(request(), answer("sglang", ("1", 0, 3), versions=False))


def test_before_the_first_update_the_label_means_the_checkpoint() -> None:
    dialect = own()
    dialect.encode(request())
    assert dialect.decode(request(), answer("vllm", ("default", 0, 1))).versions[0].version == 0


def test_requests_that_never_get_an_answer_do_not_accumulate() -> None:
    dialect = OwnVllm(version=0, stop_ids=())
    for number in range(MAX_SENT + 10):
        dialect.encode(request(str(number)))
    assert len(dialect._versions._sent) == MAX_SENT


def with_routes(array: "numpy.ndarray[Any, Any] | None", *, tokens: int = 3) -> bytes:
    body = json.loads(answer("vllm", ("1", 0, tokens)))
    if array is not None:
        file = io.BytesIO()
        numpy.save(file, array)
        body["choices"][0]["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    return json.dumps(body).encode()


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_the_experts_of_a_turn_are_read_from_where_they_were_asked_for(kind: str) -> None:
    dialect = OwnVllm(version=1, stop_ids=(), routes=True)
    asked = msgspec.structs.replace(request(), routes_from=1)
    sampling = json.loads(dialect.encode(asked))["sampling_params"]
    assert sampling["routed_experts_prompt_start"] == 1
    # of the last prompt token and two of the three sampled ones, in 2 layers
    array = numpy.arange(3 * 2 * 2, dtype=kind).reshape(3, 2, 2)
    routes = dialect.decode(asked, with_routes(array)).routes
    assert routes == Routes(
        start=1, end=4, layers=2, top_k=2, data=array.astype(f"<u{array.itemsize}").tobytes()
    )


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (None, "no choices.0..routed_experts"),
        (numpy.zeros((3, 2, 2), "uint8"), "must be of 4 tokens, by layer"),
        (numpy.zeros((4, 2), "uint8"), "must be of 4 tokens, by layer"),
        (numpy.zeros((4, 2, 2), "float32"), "in uint8 or uint16, got float32"),
        (numpy.array([None]), "cannot be read"),
    ],
)
def test_an_answer_without_the_experts_of_its_tokens_is_refused(
    array: "numpy.ndarray[Any, Any] | None", problem: str
) -> None:
    dialect = OwnVllm(version=1, stop_ids=(), routes=True)
    dialect.encode(request())
    with pytest.raises(ResponseError, match=problem):
        dialect.decode(request(), with_routes(array))


def test_experts_are_neither_asked_for_nor_read_without_replay() -> None:
    dialect = OwnVllm(version=1, stop_ids=())
    assert "routed_experts_prompt_start" not in sent(dialect)["sampling_params"]
    assert dialect.decode(request(), with_routes(numpy.zeros((4, 2, 2), "uint8"))).routes is None
