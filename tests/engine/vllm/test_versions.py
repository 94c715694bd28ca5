"""The dialect of our own vLLM server: what is sent, and which versions are believed."""

import base64
import io
import json
from typing import Any

import msgspec
import numpy
import pytest

from rollweave.engine.clients.responses import ResponseError
from rollweave.engine.servers.versions import MAX_SENT
from rollweave.engine.servers.vllm import OwnVllm
from rollweave.schema.serving import GenerateRequest, Sampling, VersionSpan
from rollweave.schema.work import Routes


def request(id: str = "r0", *, rank: float = 0.0, stop: tuple[str, ...] = ()) -> GenerateRequest:
    sampling = Sampling(stop_token_ids=(7,), stop=stop, seed=3)
    return GenerateRequest(id=id, tokens=(1, 2), sampling=sampling, rank=rank)


def answer(*spans: tuple[str, int, int]) -> bytes:
    count = spans[-1][2]
    choice = {
        "finish_reason": "stop",
        "token_ids": [5] * count,
        "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}] * count},
        "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans],
    }
    return json.dumps({"choices": [choice]}).encode()


def sent(dialect: OwnVllm, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(dialect.encode(request(**fields)))
    return body


def test_a_higher_rank_is_a_lower_priority_and_stop_tokens_are_ours() -> None:
    dialect = OwnVllm(version=-1, stop_ids=(0, 7))
    first, second = sent(dialect, rank=-3.25), sent(dialect, rank=-3.5)
    assert first["priority"] < second["priority"]
    assert (first["sampling_params"]["stop_token_ids"], first["sampling_params"]["ignore_eos"]) == (
        [0, 7],
        True,
    )
    assert first["sampling_params"]["detokenize"] is False
    assert sent(dialect, stop=("x",))["sampling_params"]["detokenize"] is True


def test_requests_of_different_weights_never_share_a_prefix() -> None:
    dialect = OwnVllm(version=-1, stop_ids=())
    salts = [sent(dialect).get("cache_salt")]
    for version, publication_id in (
        (1, 1),
        (2, 2),
        (1, 3),
    ):  # the last is of a trainer that came back
        dialect.changed(version, publication_id)
        salts.append(sent(dialect)["cache_salt"])
    assert len(set(salts)) == len(salts)


def test_versions_since_the_request_are_believed_in_their_order() -> None:
    dialect = OwnVllm(version=-1, stop_ids=())
    dialect.changed(1, 1)
    dialect.encode(request())
    dialect.changed(2, 2)
    result = dialect.decode(request(), answer(("1", 0, 2), ("2", 2, 3)))
    assert result.versions == (
        VersionSpan(start=0, end=2, version=1),
        VersionSpan(start=2, end=3, version=2),
    )


@pytest.mark.parametrize(
    "spans",
    [
        [("3", 0, 3)],  # never loaded
        [("default", 0, 3)],  # before the request
        [("1", 0, 1), ("2", 1, 2), ("1", 2, 3)],  # backwards
    ],
)
def test_other_versions_are_refused(spans: list[tuple[str, int, int]]) -> None:
    dialect = OwnVllm(version=-1, stop_ids=())
    dialect.changed(1, 1)
    dialect.encode(request())
    dialect.changed(2, 2)
    with pytest.raises(ResponseError, match="which it has not had since the request was sent"):
        dialect.decode(request(), answer(*spans))


def test_before_the_first_update_the_label_means_the_checkpoint() -> None:
    dialect = OwnVllm(version=-1, stop_ids=())
    dialect.encode(request())
    assert dialect.decode(request(), answer(("default", 0, 1))).versions[0].version == 0


def test_requests_that_never_get_an_answer_do_not_accumulate() -> None:
    dialect = OwnVllm(version=0, stop_ids=())
    for number in range(MAX_SENT + 10):
        dialect.encode(request(str(number)))
    assert len(dialect._versions._sent) == MAX_SENT


def with_routes(array: "numpy.ndarray[Any, Any] | None", *, tokens: int = 3) -> bytes:
    body = json.loads(answer(("1", 0, tokens)))
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
