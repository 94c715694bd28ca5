"""The dialect of our own SGLang server: what is sent, and which versions are
believed.
"""

import json
from typing import Any

import pytest

from rollweave.engine.clients.responses import ResponseError
from rollweave.engine.servers.sglang import OwnSglang
from rollweave.schema.serving import GenerateRequest, Sampling, VersionSpan


def request(*, rank: float = 0.0, count: int = 8, prompt: int = 2) -> GenerateRequest:
    sampling = Sampling(stop_token_ids=(7,), seed=3, max_tokens=count)
    return GenerateRequest(id="r0", tokens=(1,) * prompt, sampling=sampling, rank=rank)


def own(version: int = -1) -> OwnSglang:
    return OwnSglang(version=version, stop_ids=(0, 7), max_context=16)


def sent(dialect: OwnSglang, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(dialect.encode(request(**fields)))
    return body


def answer(*spans: tuple[str, int, int], versions: bool = True) -> bytes:
    count = spans[-1][2]
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": 7},
        "weight_version": spans[-1][0],
        "output_token_logprobs": [(-1.0, 5, None)] * count,
    }
    if versions:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return json.dumps({"text": "", "output_ids": [5] * count, "meta_info": meta}).encode()


def test_a_higher_rank_is_a_higher_priority_and_stop_tokens_are_ours() -> None:
    first, second = sent(own(), rank=-3.25), sent(own(), rank=-3.5)
    assert first["priority"] > second["priority"]
    assert first["sampling_params"]["stop_token_ids"] == [0, 7]
    assert "ignore_eos" not in first["sampling_params"]  # SGLang then ignores stop tokens, too


def test_no_sequence_exceeds_the_context() -> None:
    assert sent(own(), count=8, prompt=10)["sampling_params"]["max_new_tokens"] == 6
    assert sent(own(), count=4, prompt=10)["sampling_params"]["max_new_tokens"] == 4


def test_requests_of_different_weights_never_share_a_prefix() -> None:
    dialect = own()
    keys = [sent(dialect).get("extra_key")]
    for version, publication_id in (
        (1, 1),
        (2, 2),
        (1, 3),
    ):  # the last is of a trainer that came back
        dialect.changed(version, publication_id)
        keys.append(sent(dialect)["extra_key"])
    assert len(set(keys)) == len(keys)


def test_versions_since_the_request_are_believed_in_their_order() -> None:
    dialect = own(1)
    dialect.encode(request())
    dialect.changed(2, 2)
    result = dialect.decode(request(), answer(("1", 0, 2), ("2", 2, 3)))
    assert result.versions == (
        VersionSpan(start=0, end=2, version=1),
        VersionSpan(start=2, end=3, version=2),
    )


@pytest.mark.parametrize("label", ["3", "0"])
def test_other_versions_are_refused(label: str) -> None:
    dialect = own(1)
    dialect.encode(request())
    dialect.changed(2, 2)
    with pytest.raises(ResponseError, match="which it has not had since the request was sent"):
        dialect.decode(request(), answer((label, 0, 3)))


def test_the_label_of_an_answer_alone_is_not_believed() -> None:
    """It is that of the moment at which the answer was sent."""
    dialect = own(1)
    dialect.encode(request())
    with pytest.raises(ResponseError, match=r"no meta_info\.weight_versions"):
        dialect.decode(request(), answer(("1", 0, 3), versions=False))
