"""The engine agrees with transformers' forward pass in tokens and log-probs, whatever
else its batch does.
"""

import threading
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import pytest
import torch

from rollweave.engine.batching import StepWork
from rollweave.engine.thread import EngineThread
from rollweave.schema import serving as s
from rollweave.train.checkpoint import Checkpoint
from rollweave.train.checkpoint import save as save_checkpoint
from rollweave.weights.publication import Publisher
from tests.support.tiny_models import (
    LINEAR_ROPE,
    LLAMA3_ROPE,
    PROMPTS,
    TOLERANCE,
    VOCAB,
    Seconds,
    build,
    check_versions,
    drive,
    logprob_error,
    oracle_greedy,
    oracle_logprobs,
    publish,
    request,
    save,
    spec,
)

torch.set_num_threads(1)

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_biased_llama3_rope": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama_linear_rope_tied": (
        "llama",
        {"rope_parameters": LINEAR_ROPE, "tie_word_embeddings": True},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied_wide_heads": (
        "qwen3",
        {"tie_word_embeddings": True, "head_dim": 24, "attention_bias": True},
    ),
}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build("qwen3")


@pytest.fixture(scope="module")
def other() -> torch.nn.Module:
    return build("qwen3", seed=1)


@pytest.fixture(scope="module")
def path(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(model, tmp_path_factory.mktemp("model"))


def baseline(path: str, *, count: int, **sampling: Any) -> dict[int, s.GenerateResult]:
    """Run every prompt alone, in a separate engine."""
    return {
        i: drive(
            spec(path), [request("x", p, max_tokens=count, **({"seed": i} | sampling))]
        ).results["x"]
        for i, p in enumerate(PROMPTS)
    }


# Against transformers.


@pytest.mark.variants
@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_and_logprobs_match_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = KINDS[name]
    model = build(kind, **changes)
    path = save(model, tmp_path)
    requests = [request(str(i), p, temperature=0.0, max_tokens=20) for i, p in enumerate(PROMPTS)]
    outcome = drive(spec(path, prefill_chunk_tokens=32), requests)
    for i, prompt in enumerate(PROMPTS):
        result = outcome.results[str(i)]
        assert list(result.tokens) == oracle_greedy(model, prompt, 20)
        assert logprob_error(model, prompt, result) <= TOLERANCE
        assert result.finish is s.FinishReason.LENGTH


def test_a_sharded_checkpoint_is_the_same_model(
    model: torch.nn.Module, path: str, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    assert (tmp_path / "model.safetensors.index.json").exists()
    one = drive(spec(path), [request("x", PROMPTS[1], seed=4, max_tokens=8)]).results["x"]
    two = drive(spec(str(tmp_path)), [request("x", PROMPTS[1], seed=4, max_tokens=8)]).results["x"]
    assert (one.tokens, one.logprobs) == (two.tokens, two.logprobs)


def test_bfloat16_stays_near_the_fp32_oracle(model: torch.nn.Module, path: str) -> None:
    result = drive(
        spec(path, dtype="bfloat16"), [request("x", PROMPTS[1], seed=4, max_tokens=16)]
    ).results["x"]
    assert 0 < logprob_error(model, PROMPTS[1], result) <= 0.15


def test_a_cpu_without_bfloat16_computes_in_float32(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request("x", PROMPTS[1], seed=4, max_tokens=16)]
    full = drive(spec(path), requests).results["x"]
    monkeypatch.setattr("rollweave.io.machine.has_bfloat16", lambda: False)
    short = drive(spec(path, dtype="bfloat16"), requests).results["x"]
    assert (short.tokens, short.logprobs) == (full.tokens, full.logprobs)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_logprobs_are_those_at_the_sampling_temperature(
    model: torch.nn.Module, path: str, temperature: float
) -> None:
    requests = [
        request(str(i), p, temperature=temperature, top_k=7, top_p=0.8, seed=i, max_tokens=12)
        for i, p in enumerate(PROMPTS)
    ]
    outcome = drive(spec(path), requests)
    for i, prompt in enumerate(PROMPTS):
        assert (
            logprob_error(model, prompt, outcome.results[str(i)], temperature=temperature)
            <= TOLERANCE
        )


# Whatever happens to a batch, a request's tokens and log-probs stay what they are.


def test_tokens_do_not_depend_on_neighbors_chunks_or_slots(
    model: torch.nn.Module, path: str
) -> None:
    reference = baseline(path, count=24)
    for changes in (
        {},
        {"prefill_chunk_tokens": 5},
        {"max_slots": 2},
        {"kv_tokens": 96},
        {"prefix_cache": False},
    ):
        requests = [request(str(i), p, seed=i, max_tokens=24) for i, p in enumerate(PROMPTS)]
        outcome = drive(spec(path, **changes), requests)
        for i, prompt in enumerate(PROMPTS):
            result = outcome.results[str(i)]
            assert result.tokens == reference[i].tokens, changes
            assert logprob_error(model, prompt, result) <= TOLERANCE


def test_tokens_are_determined_by_the_seed(path: str) -> None:
    def run(offset: int) -> list[tuple[int, ...]]:
        requests = [
            request(str(i), PROMPTS[i % 5], seed=i + offset, max_tokens=12) for i in range(20)
        ]
        results = drive(spec(path), requests).results
        return [results[str(i)].tokens for i in range(20)]

    assert run(0) == run(0) != run(100)


def test_preemption_keeps_tokens_and_recomputes_nothing(model: torch.nn.Module, path: str) -> None:
    reference = baseline(path, count=24)
    low = [request(str(i), PROMPTS[i], seed=i, max_tokens=24) for i in (0, 1)]
    high = [
        s.Add(request=request(str(i), PROMPTS[i], seed=i, max_tokens=24, rank=1.0)) for i in (3, 4)
    ]
    outcome = drive(spec(path, max_slots=2), low, at={6: high, 12: [s.Rerank(id="1", rank=2.0)]})
    assert outcome.stats[-1].preemptions == 3
    assert outcome.stats[-1].recomputed_tokens == 0
    assert sum(result.preemptions for result in outcome.results.values()) == 3
    for i in (0, 1, 3, 4):
        result = outcome.results[str(i)]
        assert result.tokens == reference[i].tokens
        assert logprob_error(model, PROMPTS[i], result) <= TOLERANCE
    assert [result.id for result in outcome.answers][-1] == "0"


# Time in the queue, and the budget of the time in a slot.


def test_time_without_a_slot_is_queueing_also_after_a_preemption(path: str) -> None:
    """There are one slot and one token per second: "low" starts, "high" takes its slot,
    and "mid" waits for that one.
    """
    high = s.Add(request=request("high", PROMPTS[0], rank=2.0, max_tokens=4))
    mid = s.Add(request=request("mid", PROMPTS[3], rank=1.0, max_tokens=3))
    low = request("low", PROMPTS[2], max_tokens=10)
    outcome = drive(spec(path, max_slots=1), [low], at={4: [high, mid]}, clock=Seconds())
    assert [result.id for result in outcome.answers] == ["high", "mid", "low"]
    # Of n tokens the last is there n - 1 seconds after the first; the next request
    # begins a second later.
    times = {name: (result.queue_s, result.generate_s) for name, result in outcome.results.items()}
    assert times == {"high": (0, 3), "mid": (4, 2), "low": (4 + 3, 9)}
    assert outcome.results["low"].preemptions == 1
    assert outcome.stats[-1].recomputed_tokens == 0


def test_a_budget_counts_the_time_in_a_slot_alone(path: str) -> None:
    """Each request has a budget of 5 seconds, and waits longer than that: in the queue,
    preempted, or while the engine is suspended.
    """
    clock = Seconds()

    def resume_later() -> s.Resume:
        clock.now += 100.0
        return s.Resume()

    budget = {
        name: msgspec.structs.replace(request(name, p, max_tokens=20), budget_s=5.0)
        for name, p in zip("ab", PROMPTS, strict=False)
    }
    first = s.Add(request=request("first", PROMPTS[4], rank=2.0, max_tokens=12))
    at = {3: [first], 6: [s.Suspend()], 7: [resume_later]}
    results = drive(spec(path, max_slots=1), budget.values(), at=at, clock=clock).results
    assert results["first"].finish is s.FinishReason.LENGTH  # has no budget
    for name in "ab":
        result = results[name]
        # The step that begins in the fifth second is the last one.
        assert (result.finish, result.generate_s, len(result.tokens)) == (s.FinishReason.TIME, 5, 6)
        assert result.queue_s > 100
        assert (
            result.tokens
            == drive(spec(path), [request("x", budget[name].tokens, max_tokens=20)])
            .results["x"]
            .tokens[:6]
        )


def test_request_within_its_budget_is_not_cut(path: str) -> None:
    requests = [
        msgspec.structs.replace(request(str(n), PROMPTS[0], max_tokens=n), budget_s=4.0)
        for n in (1, 5, 6)
    ]
    results = drive(spec(path), requests, clock=Seconds()).results
    assert {name: (result.finish, len(result.tokens)) for name, result in results.items()} == {
        "1": (s.FinishReason.LENGTH, 1),
        "5": (s.FinishReason.LENGTH, 5),
        "6": (s.FinishReason.TIME, 5),
    }


def test_aborted_neighbors_return_their_tokens_and_change_nothing(
    model: torch.nn.Module, path: str
) -> None:
    reference = baseline(path, count=24)
    requests = [request(str(i), p, seed=i, max_tokens=24) for i, p in enumerate(PROMPTS)]
    aborts = {4: [s.Abort(id="1")], 9: [s.Abort(id="3"), s.Abort(id="nobody")]}
    outcome = drive(spec(path), requests, at=aborts)
    for i, prompt in enumerate(PROMPTS):
        result = outcome.results[str(i)]
        assert result.finish is (s.FinishReason.ABORTED if i in (1, 3) else s.FinishReason.LENGTH)
        assert result.tokens == reference[i].tokens[: len(result.tokens)]
        assert logprob_error(model, prompt, result) <= TOLERANCE
    assert 0 < len(outcome.results["1"].tokens) < len(outcome.results["3"].tokens) < 24


def test_abort_before_the_first_step_yields_an_empty_result(path: str) -> None:
    requests = [request(str(i), PROMPTS[0], max_tokens=4) for i in range(3)]
    result = drive(spec(path, max_slots=1), requests, at={0: [s.Abort(id="2")]}).results["2"]
    assert (result.finish, result.tokens, result.versions) == (s.FinishReason.ABORTED, (), ())


def test_suspension_stops_the_steps_and_changes_nothing(path: str) -> None:
    reference = baseline(path, count=16)
    requests = [request(str(i), p, seed=i, max_tokens=16) for i, p in enumerate(PROMPTS[:4])]
    last = s.Add(request=request("4", PROMPTS[4], seed=4, max_tokens=16))
    outcome = drive(spec(path), requests, at={5: [s.Suspend()], 7: [last], 9: [s.Resume()]})
    assert [message.in_flight for message in outcome.of(s.Suspended)] == [4]
    steps = [stats.steps for stats in outcome.stats]
    assert steps == sorted(steps)
    assert steps[5] < steps[6] == steps[10] < steps[11]
    assert {i: outcome.results[str(i)].tokens for i in range(5)} == {
        i: reference[i].tokens for i in range(5)
    }
    assert outcome.stats[-1].suspended_s > 0
    assert outcome.stats[-1].busy_s + outcome.stats[-1].suspended_s <= outcome.stats[-1].uptime_s


def test_starved_kv_still_finishes_everything(model: torch.nn.Module, path: str) -> None:
    prompts = [[(i * 5 + j) % VOCAB for j in range(3 + i % 9)] for i in range(24)]
    requests = [
        request(str(i), p, seed=i, max_tokens=30, rank=float(i % 3)) for i, p in enumerate(prompts)
    ]
    outcome = drive(spec(path, kv_tokens=128, max_slots=8), requests)
    assert outcome.stats[-1].preemptions > 0
    for i, prompt in enumerate(prompts):
        result = outcome.results[str(i)]
        assert len(result.tokens) == 30
        assert logprob_error(model, prompt, result) <= TOLERANCE
    assert outcome.stats[-1].kv_used_tokens == 0


# Weights.


@pytest.mark.parametrize("suspended", [False, True])
def test_an_update_in_flight_is_piecewise_the_two_models(
    model: torch.nn.Module, other: torch.nn.Module, path: str, publisher: Publisher, suspended: bool
) -> None:
    load = [s.Load(manifest=publish(publisher, other, version=3))]
    at = {6: [s.Suspend()], 8: [*load, s.Resume()]} if suspended else {6: load}
    requests = [request(str(i), p, seed=i, max_tokens=20) for i, p in enumerate(PROMPTS)]
    outcome = drive(spec(path, prefill_chunk_tokens=32), requests, at=at)
    loaded = outcome.of(s.Loaded)
    assert [message.version for message in loaded] == [3]
    assert loaded[0].recompute_tokens == outcome.stats[-1].recomputed_tokens > 0
    for i, prompt in enumerate(PROMPTS):
        result = outcome.results[str(i)]
        assert [span.version for span in result.versions] == [-1, 3]
        check_versions(prompt, result, {-1: model, 3: other})
    assert outcome.stats[-1].version == 3


def test_consecutive_weight_updates(
    model: torch.nn.Module, other: torch.nn.Module, path: str, publisher: Publisher
) -> None:
    loads = {
        4: [s.Load(manifest=publish(publisher, other, version=1))],
        5: [s.Load(manifest=publish(publisher, model, version=2))],
    }
    requests = [
        request(str(i), p, seed=i, max_tokens=16, temperature=0.7) for i, p in enumerate(PROMPTS)
    ]
    outcome = drive(spec(path), requests, at=loads)
    for i, prompt in enumerate(PROMPTS):
        check_versions(
            prompt, outcome.results[str(i)], {-1: model, 1: other, 2: model}, temperature=0.7
        )


def test_mismatched_load_changes_nothing(
    model: torch.nn.Module, other: torch.nn.Module, path: str, publisher: Publisher
) -> None:
    good = publish(publisher, other, version=1)
    state = dict(other.state_dict())
    name = "model.layers.1.self_attn.q_proj.weight"
    broken = {
        "digest": msgspec.structs.replace(good, digest="0" * 32),
        "missing": publisher.publish(
            {k: v for k, v in state.items() if k != name}, version=2, publication_id=2
        ),
        "unknown": publisher.publish(
            state | {"model.extra": state[name]}, version=3, publication_id=3
        ),
        "shape": publisher.publish(
            state | {name: state[name][:4].contiguous()}, version=4, publication_id=4
        ),
        "dtype": publisher.publish(
            state | {name: state[name].to(torch.int32)}, version=5, publication_id=5
        ),
    }
    at: dict[int, Any] = {
        3 + i: [s.Load(manifest=manifest)] for i, manifest in enumerate(broken.values())
    }
    reference = baseline(path, count=16)
    requests = [request(str(i), p, seed=i, max_tokens=16) for i, p in enumerate(PROMPTS)]
    outcome = drive(spec(path), requests, at=at)
    failed = outcome.of(s.LoadFailed)
    assert [message.version for message in failed] == [
        manifest.version for manifest in broken.values()
    ]
    assert "missing" in failed[1].error
    assert "unknown" in failed[2].error
    assert "shape" in failed[3].error
    assert outcome.of(s.Loaded) == []
    assert {i: outcome.results[str(i)].tokens for i in range(5)} == {
        i: reference[i].tokens for i in range(5)
    }
    assert outcome.stats[-1].recomputed_tokens == 0


@pytest.mark.parametrize(
    "damage", ["whole", "flipped", "truncated", "of another step", "of another model", "gone"]
)
def test_checkpoint_load_is_atomic(
    model: torch.nn.Module, other: torch.nn.Module, path: str, tmp_path: Path, damage: str
) -> None:
    saved = tmp_path / "c"
    state = dict(
        build("llama").state_dict() if damage == "of another model" else other.state_dict()
    )
    checkpoint = Checkpoint(
        step=4 if damage == "of another step" else 3, model=state, optimizer={}, rng={}
    )
    save_checkpoint(saved, checkpoint, export_dtype=torch.float32)
    file = saved / "model.safetensors"
    content = bytearray(file.read_bytes())
    if damage in ("flipped", "truncated"):
        content[-5] ^= 1
        file.write_bytes(content[:-40] if damage == "truncated" else content)
    elif damage == "gone":
        file.unlink()
    load = s.LoadCheckpoint(version=3, publication_id=9, directory=str(saved), dtype="float32")
    requests = [request(str(i), p, seed=i, max_tokens=16) for i, p in enumerate(PROMPTS)]
    outcome = drive(spec(path), requests, at={6: [load]})
    assert [
        message.version for message in outcome.of(s.LoadFailed if damage != "whole" else s.Loaded)
    ] == [3]
    versions = {-1: model, 3: other} if damage == "whole" else {-1: model}
    for i, prompt in enumerate(PROMPTS):
        assert {span.version for span in outcome.results[str(i)].versions} == versions.keys()
        check_versions(prompt, outcome.results[str(i)], versions)


@pytest.mark.parametrize("kind", ["llama_biased_llama3_rope", "llama_linear_rope_tied", "qwen2"])
def test_state_dicts_of_every_architecture_load(
    kind: str, tmp_path: Path, publisher: Publisher
) -> None:
    name, changes = KINDS[kind]
    old, new = build(name, **changes), build(name, seed=1, **changes)
    half = {key: value.to(torch.bfloat16) for key, value in new.state_dict().items()}
    new.load_state_dict(half)
    manifest = publisher.publish(half, version=1, publication_id=1)
    requests = [request("x", PROMPTS[1], max_tokens=12)]
    outcome = drive(spec(save(old, tmp_path / "m")), requests, at={5: [s.Load(manifest=manifest)]})
    check_versions(PROMPTS[1], outcome.results["x"], {-1: old, 1: new})


def test_nonfinite_weights_are_errors_and_leave_no_trace(
    model: torch.nn.Module, other: torch.nn.Module, path: str, publisher: Publisher
) -> None:
    poison = {
        name: torch.full_like(value, float("nan")) for name, value in model.state_dict().items()
    }
    bad = publisher.publish(poison, version=1, publication_id=1)
    good = publish(publisher, other, version=2)
    requests = [request(str(i), p, seed=i, max_tokens=20) for i, p in enumerate(PROMPTS)]
    later = [s.Load(manifest=good)] + [
        s.Add(request=request(f"b{i}", p, seed=i, max_tokens=20)) for i, p in enumerate(PROMPTS)
    ]
    outcome = drive(spec(path), requests, at={5: [s.Load(manifest=bad)], 12: later})
    for i, prompt in enumerate(PROMPTS):
        before, after = outcome.results[str(i)], outcome.results[f"b{i}"]
        assert before.finish is s.FinishReason.ERROR
        assert "not finite" in before.error
        assert after.finish is s.FinishReason.LENGTH
        check_versions(prompt, after, {2: other})


# The prefix cache.


def test_turns_hit_the_blocks_of_earlier_turns(model: torch.nn.Module, path: str) -> None:
    context = PROMPTS[3]
    engine = spec(path)
    reached = 0
    adds: dict[int, Any] = {}
    results: list[s.GenerateResult] = []
    for turn in range(4):
        done = drive(engine, [request("t", context, seed=turn, max_tokens=9)]).results["t"]
        adds[turn * 40] = [s.Add(request=request(str(turn), context, seed=turn, max_tokens=9))]
        results.append(done)
        context = [*context, *done.tokens, 7, 8]
    outcome = drive(engine, [], at=adds)
    for turn in range(4):
        result = outcome.results[str(turn)]
        assert result.tokens == results[turn].tokens
        prompt = len(adds[turn * 40][0].request.tokens)
        assert result.cached_tokens == reached // 8 * 8
        reached = prompt + 8
        assert logprob_error(model, adds[turn * 40][0].request.tokens, result) <= TOLERANCE
    stats = outcome.stats[-1]
    assert (
        stats.cached_tokens == sum(result.cached_tokens for result in outcome.results.values()) > 0
    )


def test_prefix_is_recomputed_after_an_update(
    model: torch.nn.Module, other: torch.nn.Module, path: str, publisher: Publisher
) -> None:
    def add(name: str) -> s.Add:
        return s.Add(request=request(name, PROMPTS[1], seed=1, max_tokens=4))

    load = s.Load(manifest=publish(publisher, other, version=1))
    outcome = drive(
        spec(path),
        [],
        at={0: [add("cold")], 10: [add("warm")], 20: [load, add("new")], 30: [add("again")]},
    )
    cached = {name: result.cached_tokens for name, result in outcome.results.items()}
    assert cached == {"cold": 0, "warm": 32, "new": 0, "again": 32}
    for name in ("new", "again"):
        check_versions(PROMPTS[1], outcome.results[name], {1: other})


def test_a_group_computes_its_prompt_once(path: str) -> None:
    requests = [request(str(i), PROMPTS[1], seed=i, max_tokens=8) for i in range(8)]
    outcome = drive(spec(path), requests)
    assert sorted(result.cached_tokens for result in outcome.results.values()) == [0] + [32] * 7
    assert len({result.tokens for result in outcome.results.values()}) > 1


# Ends and refusals.


def test_stop_tokens_end_a_request_and_are_part_of_it(path: str) -> None:
    free = drive(spec(path), [request("x", PROMPTS[0], seed=5, max_tokens=12)]).results["x"]
    stop = free.tokens[6]
    first = free.tokens.index(stop) + 1
    for engine, sampling in (
        (spec(path), {"stop_token_ids": (stop,)}),
        (spec(path, eos_token_ids=(stop,)), {}),
    ):
        result = drive(
            engine, [request("x", PROMPTS[0], seed=5, max_tokens=12, **sampling)]
        ).results["x"]
        assert (result.tokens, result.finish) == (free.tokens[:first], s.FinishReason.STOP)


def test_allowed_tokens_only_and_their_plain_logprobs(model: torch.nn.Module, path: str) -> None:
    allowed = (4, 11, 60)
    requests = [
        request("mask", PROMPTS[0], seed=2, max_tokens=20, allowed=allowed),
        request("greedy", PROMPTS[0], temperature=0.0, max_tokens=20, allowed=allowed),
        request("free", PROMPTS[1], seed=2, max_tokens=20),
    ]
    results = drive(spec(path), requests).results
    assert set(results["mask"].tokens) <= set(allowed)
    assert set(results["greedy"].tokens) <= set(allowed)
    assert not set(results["free"].tokens) <= set(allowed)
    for name in ("mask", "greedy", "free"):
        assert logprob_error(model, PROMPTS[1 if name == "free" else 0], results[name]) <= TOLERANCE


REFUSED = {
    "at least one token": request("empty", []),
    "[0, 97), got 1 to 97": request("foreign", [1, VOCAB]),
    "[0, 97), got -1": request("negative", [-1]),
    "context of 512 tokens, got a prompt of 512": request("long", [1] * 512),
    "rank must be finite": request("rank", [1], rank=float("nan")),
    "budget_s must be 0 (none) or more": msgspec.structs.replace(
        request("budget", [1]), budget_s=float("nan")
    ),
    "sampling.allowed must be in": request("allowed", [1], allowed=(VOCAB,)),
    "sampling.stop needs a tokenizer": request("text", [1], stop=("end",)),
    "sampling.stop must have at most 64, got 65": request("stops", [1], stop=("end",) * 65),
    "at most 4096 characters, got one of 4097": request("stop", [1], stop=("e" * 4097,)),
    "stop_token_ids must have at most 4096": request("ids", [1], stop_token_ids=(1,) * 4097),
    "sampling.allowed must have at most 97": request("all", [1], allowed=(1,) * (VOCAB + 1)),
}


def test_invalid_requests_are_refused_with_the_reason(path: str) -> None:
    twice = [request("twice", PROMPTS[0], max_tokens=30), request("twice", PROMPTS[0])]
    edge = request("edge", [1] * 511, max_tokens=50)
    outcome = drive(spec(path), [*twice, *REFUSED.values(), edge])
    failed = [answer for answer in outcome.answers if answer.finish is s.FinishReason.ERROR]
    errors = {answer.id: answer.error for answer in failed}
    assert "unique" in errors.pop("twice")
    assert {words: words in errors[asked.id] for words, asked in REFUSED.items()} == dict.fromkeys(
        REFUSED, True
    )
    assert len(errors) == len(REFUSED)
    ended = [answer for answer in outcome.answers if answer.finish is s.FinishReason.LENGTH]
    # the context ends before max_tokens does
    assert {answer.id: len(answer.tokens) for answer in ended} == {"twice": 30, "edge": 1}


def test_the_context_is_bounded_by_the_kv_cache(path: str) -> None:
    outcome = drive(
        spec(path, kv_tokens=64), [request("x", [1] * 64), request("y", [1] * 60, max_tokens=50)]
    )
    assert outcome.of(s.Ready)[0] == s.Ready(
        version=-1, kv_total_tokens=64, max_slots=8, max_context=64, stages=True
    )
    assert "context of 64 tokens" in outcome.results["x"].error
    assert len(outcome.results["y"].tokens) == 4


def test_failure_of_the_loop_is_reported(tmp_path: Path) -> None:
    replies: list[s.EngineReply] = []
    EngineThread(spec(str(tmp_path / "nothing")), replies.append).run()
    assert len(replies) == 1
    assert isinstance(replies[0], s.EngineFatal)
    assert "config.json" in replies[0].error


def test_an_idle_engine_sleeps_until_another_thread_posts(path: str) -> None:
    replies: Queue[s.EngineReply] = Queue()
    loop = EngineThread(spec(path), replies.put)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    assert isinstance(replies.get(timeout=60), s.Ready)
    for name in ("a", "b"):
        loop.post(s.Add(request=request(name, PROMPTS[0], max_tokens=3)))
        answer = replies.get(timeout=60)
        assert isinstance(answer, s.Generated)
        assert answer.result.id == name
    loop.post(s.Shutdown())
    thread.join(60)
    assert not thread.is_alive()


def test_a_heartbeat_is_answered_during_a_step(path: str) -> None:
    """With the step that is under way, and its seconds; nothing while there is none."""
    replies, clock = Queue[s.EngineReply](), Seconds()
    in_step, go_on = threading.Event(), threading.Event()

    def watch(work: StepWork, seconds: float) -> None:
        in_step.set()
        go_on.wait(60)

    engine = EngineThread(spec(path), replies.put, watch=watch, clock=clock)
    thread = threading.Thread(target=engine.run)
    thread.start()
    assert isinstance(replies.get(timeout=60), s.Ready)
    engine.post(s.Add(request=request("a", PROMPTS[0], max_tokens=2)))
    assert in_step.wait(60)
    clock.now += 7.0
    engine.post(s.Beat())
    beating = replies.get(timeout=60)
    assert isinstance(beating, s.Beating)
    count = len(PROMPTS[0])
    assert beating.doing == f"a step of 0 sequences and {count} prompt tokens"
    assert beating.for_s >= 7.0
    assert beating.kv_used
    go_on.set()
    assert isinstance(replies.get(timeout=60), s.Generated)
    engine.post(s.Shutdown())
    thread.join(60)


# Deterministic mode.


@pytest.mark.extended
def test_deterministic_results_do_not_depend_on_the_batch(
    model: torch.nn.Module, path: str
) -> None:
    engine = {"deterministic": True}
    reference = {
        i: drive(spec(path, **engine), [request("x", p, seed=i, max_tokens=24)]).results["x"]
        for i, p in enumerate(PROMPTS)
    }
    for changes in (
        {},
        {"prefill_chunk_tokens": 7},
        {"kv_tokens": 96},
        {"max_slots": 3, "prefix_cache": False},
    ):
        requests = [request(str(i), p, seed=i, max_tokens=24) for i, p in enumerate(PROMPTS)]
        requests += [request(f"n{i}", [i + 3] * (i + 1), seed=i, max_tokens=9) for i in range(9)]
        outcome = drive(spec(path, **(engine | changes)), requests, at={9: [s.Abort(id="n3")]})
        for i, prompt in enumerate(PROMPTS):
            result = outcome.results[str(i)]
            assert (result.tokens, result.logprobs) == (reference[i].tokens, reference[i].logprobs)
            assert logprob_error(model, prompt, result) <= TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prefill_chunk_tokens": 8},
        {"prefill_chunk_tokens": 8, "deterministic": True},
        {"prefill_chunk_tokens": 16, "kv_tokens": 64},  # requests lose their blocks
    ],
)
def test_prompts_are_scored(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = build("qwen3")
    path = str(save(model, tmp_path))
    asked = [
        msgspec.structs.replace(
            request(f"scored {at}", prompt, max_tokens=12, seed=at), prompt_logprobs=True
        )
        for at, prompt in enumerate(PROMPTS)
    ]
    # the same prompts without scores come first, so that the cache has them
    others = [request(str(at), prompt, max_tokens=3) for at, prompt in enumerate(PROMPTS)]
    results = drive(spec(path, **changes), [*others, *asked]).results
    for at, prompt in enumerate(PROMPTS):
        rows = oracle_logprobs(model, prompt)
        want = [rows[place, token].item() for place, token in enumerate(prompt[1:])]
        assert results[f"scored {at}"].prompt_logprobs == pytest.approx(want, abs=TOLERANCE)
        assert results[f"scored {at}"].cached_tokens == 0
        assert logprob_error(model, prompt, results[f"scored {at}"]) < TOLERANCE
        assert results[str(at)].prompt_logprobs == ()
