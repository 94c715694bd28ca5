"""The state of a turn is transformers' last hidden state times the projection, whatever
else the batch does, and an engine computes none that is not asked for.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rollweave.engine.runner import Runner, projection
from rollweave.io.wire import decoder_of, encode
from rollweave.schema import serving as s
from rollweave.weights.publication import Publisher
from tests.support.tiny_models import (
    PROMPTS,
    build,
    drive,
    oracle_state,
    publish,
    request,
    save,
    spec,
)

torch.set_num_threads(1)

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build("qwen3")


@pytest.fixture(scope="module")
def path(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(model, tmp_path_factory.mktemp("model"))


def requests(**sampling: Any) -> list[s.GenerateRequest]:
    """One request for each prompt, of different lengths."""
    return [
        request(str(i), prompt, **({"seed": i, "max_tokens": 4 + 5 * i} | sampling))
        for i, prompt in enumerate(PROMPTS)
    ]


def near(values: Any) -> Any:
    return pytest.approx(list(values), rel=2e-3, abs=2e-3)


def check(model: torch.nn.Module, results: dict[str, s.GenerateResult]) -> None:
    for i, prompt in enumerate(PROMPTS):
        if str(i) in results:
            result = results[str(i)]
            assert len(result.state) == s.STATE_WIDTH
            assert list(result.state) == near(oracle_state(model, prompt, result))
            assert result.state == tuple(np.float16(result.state).tolist())


def test_a_projection_keeps_distances_and_depends_on_the_size_alone() -> None:
    matrix = projection(576)
    assert matrix.shape == (576, s.STATE_WIDTH)
    assert (matrix == projection(576)).all()
    assert float(matrix[0, 0]) == pytest.approx(float(np.float32(FIRST / 24)))
    one, other = torch.randn(2, 200, 576, generator=torch.Generator().manual_seed(1))
    before, after = (one - other).norm(dim=1), ((one - other) @ matrix).norm(dim=1)
    ratios = after / before / (s.STATE_WIDTH / 576) ** 0.5
    assert ratios.mean() == pytest.approx(1.0, abs=0.05)
    assert ratios.std() < 0.15


FIRST = np.random.RandomState(0x5747).standard_normal()


@pytest.mark.variants
@pytest.mark.parametrize("name", KINDS)
def test_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = KINDS[name]
    own = build(kind, **changes)
    check(own, drive(spec(save(own, tmp_path), states=True), requests()).results)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_slots": 1},
        {"prefill_chunk_tokens": 5},
        {"max_slots": 2, "kv_tokens": 96},
        {"prefix_cache": False},
        {"deterministic": True},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_states_do_not_depend_on_the_batch(
    model: torch.nn.Module, path: str, changes: dict[str, Any]
) -> None:
    of = spec(path, states=True, **changes)
    results = drive(of, requests()).results
    if "dtype" not in changes:
        check(model, results)
    for one in requests():
        alone = drive(of, [one]).results[one.id]
        together = results[one.id]
        if alone.tokens == together.tokens:  # in bfloat16 a batch may change a token
            rounding = 0.2 if "dtype" in changes else 2e-3
            assert together.state == pytest.approx(alone.state, rel=rounding, abs=rounding)
        if "deterministic" in changes:
            assert alone.state == together.state


def test_a_turn_that_a_stop_token_ends_has_the_state_before_it(
    model: torch.nn.Module, path: str
) -> None:
    whole = drive(spec(path), requests(max_tokens=9)).results
    stops = {id: result.tokens[5] for id, result in whole.items()}
    asked = [
        replace(one, sampling=replace(one.sampling, stop_token_ids=(stops[one.id],)))
        for one in requests(max_tokens=9)
    ]
    results = drive(spec(path, states=True), asked).results
    assert {result.finish for result in results.values()} == {s.FinishReason.STOP}
    check(model, results)


def test_states_survive_preemption_and_shared_prefixes(model: torch.nn.Module, path: str) -> None:
    low = [request(str(i), PROMPTS[i], seed=i, max_tokens=24) for i in (0, 1)]
    high = [
        s.Add(request=request(str(i), PROMPTS[i], seed=i, max_tokens=24, rank=1.0)) for i in (3, 4)
    ]
    again = s.Add(request=request("again", PROMPTS[1], seed=1, max_tokens=24))
    outcome = drive(spec(path, max_slots=2, states=True), low, at={6: high, 60: [again]})
    assert outcome.stats[-1].preemptions
    assert outcome.results["again"].cached_tokens
    check(model, outcome.results)
    assert outcome.results["again"].state == pytest.approx(outcome.results["1"].state, abs=2e-3)


def test_a_resumed_turn_has_the_state_of_the_whole_turn(model: torch.nn.Module, path: str) -> None:
    whole = drive(spec(path), [request("1", PROMPTS[1], max_tokens=9)]).results["1"]
    for kept, states in ((4, 1), (8, 1), (9, 0)):
        resumed = s.PartialOutput(
            tokens=whole.tokens[:kept],
            logprobs=whole.logprobs[:kept],
            versions=(s.VersionSpan(start=0, end=kept, version=-1),),
        )
        asked = replace(request("1", PROMPTS[1], max_tokens=9), resumed=resumed)
        result = drive(spec(path, states=True), [asked]).results["1"]
        assert result.tokens == whole.tokens
        assert bool(result.state) == states, "nothing was computed for a turn that had ended"
        if states:
            check(model, {"1": result})


def test_scored_prompts_do_not_shift_states(model: torch.nn.Module, path: str) -> None:
    asked = [replace(one, prompt_logprobs=True) for one in requests(max_tokens=1)]
    check(model, drive(spec(path, states=True, prefill_chunk_tokens=24), asked).results)


def test_states_are_those_of_new_weights(
    model: torch.nn.Module, path: str, publisher: Publisher
) -> None:
    new = build("qwen3", seed=1)
    manifest = publish(publisher, new, version=1)
    load = (s.Suspend(), s.Load(manifest=manifest), s.Resume())
    results = drive(spec(path, states=True), requests(max_tokens=30), at={8: load}).results
    check(new, results)


def test_an_engine_computes_no_state_that_is_not_asked_for(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a state is computed")

    monkeypatch.setattr(Runner, "state", fail)
    results = drive(spec(path), requests()).results
    assert [result.state for result in results.values()] == [()] * len(PROMPTS)


def test_an_aborted_turn_has_no_state(path: str) -> None:
    outcome = drive(spec(path, states=True), requests(max_tokens=50), at={9: [s.Abort(id="1")]})
    assert outcome.results["1"].finish is s.FinishReason.ABORTED
    assert [id for id, one in outcome.results.items() if not one.state] == ["1"]


def test_a_state_travels_unchanged(path: str) -> None:
    (result,) = drive(spec(path, states=True), requests()[:1]).results.values()
    sent = encode(s.Generated(result=result))
    assert decoder_of(s.EngineReply)(sent) == s.Generated(result=result)
