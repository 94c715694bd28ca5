"""The profile that an engine measures before it serves is complete and plausible, and
leaves no trace.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollweave.engine import measure
from rollweave.engine.measure import capped_slots, step_times
from rollweave.engine.runner import Runner
from rollweave.schema.serving import Ready
from tests.support.tiny_models import build, drive, request, save, spec

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(build("qwen3"), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("changes", "batches"),
    [
        ({"max_slots": 1}, [1]),
        ({"max_slots": 8}, [1, 2, 4, 8]),
        ({"max_slots": 11}, [1, 2, 4, 8, 11]),
        ({"max_slots": 8, "deterministic": True}, [1, 2, 4, 8]),
        ({"max_slots": 8, "dtype": "bfloat16"}, [1, 2, 4, 8]),
        ({"max_slots": 8, "kv_tokens": 48}, [1, 2, 3]),  # no more blocks than that
        ({"max_slots": 8, "kv_tokens": 4, "block_tokens": 4}, []),
    ],
)
def test_every_batch_is_measured_and_nothing_is_left_behind(
    path: str, changes: dict[str, Any], batches: list[int]
) -> None:
    of = spec(path, **changes)
    with torch.inference_mode():
        runner = Runner(of)
        times = step_times(of, runner)
    assert [step.batch for step in times] == batches
    assert all(0 < step.seconds < 60 for step in times)
    assert not runner.pool.data.any()
    if runner.mirror is not None:
        assert runner.mirror.rows == []
        assert runner.mirror.keys[0].numel() == 0


def test_engine_reports_its_profile_and_serves_as_without_one(path: str) -> None:
    plain, measured = (
        drive(spec(path, profile=profile), [request("x", [3, 1, 4], seed=1, max_tokens=12)])
        for profile in (False, True)
    )
    assert plain.of(Ready)[0].profile == ()
    profile = measured.of(Ready)[0].profile
    assert [step.batch for step in profile] == [1, 2, 4, 8]
    assert msgspec.structs.replace(measured.of(Ready)[0], profile=()) == plain.of(Ready)[0]
    one, other = plain.results["x"], measured.results["x"]
    assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
    times = {"busy_s": 0.0, "uptime_s": 0.0}
    assert [msgspec.structs.replace(stats, **times) for stats in plain.stats] == [
        msgspec.structs.replace(stats, **times) for stats in measured.stats
    ]


def test_a_model_whose_context_is_too_short_has_no_profile(tmp_path: Path) -> None:
    of = spec(save(build("qwen3", max_position_embeddings=6), tmp_path))
    with torch.inference_mode():
        assert step_times(of, Runner(of)) == ()


@pytest.mark.parametrize(
    ("seconds", "changes", "expected"),
    [
        (lambda batch: 1.0, {}, 61),  # each sequence is for free, and 95 % of 64 suffice
        (lambda batch: float(batch), {}, 1),  # each takes as long as the first one
        (lambda batch: max(1.0, batch / 16), {}, 16),  # the knee of ROSE's Fig. 12
        (lambda batch: 1.0, {"kv_tokens": 512}, 12),  # 12 sequences of 5 blocks have room
        (lambda batch: 1.0, {"kv_tokens": 48}, 1),
    ],
)
def test_an_engine_takes_the_fewest_sequences_of_nearly_the_best_throughput(
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[int], float],
    changes: dict[str, Any],
    expected: int,
) -> None:
    contexts = set()

    def step_s(runner: Runner, batch: int, context: int) -> float:
        contexts.add(context)
        return seconds(batch)

    monkeypatch.setattr(measure, "_step_s", step_s)
    of = spec(path, max_slots=64, **{"kv_tokens": 8192, "slots_context": 20, **changes})
    with torch.inference_mode():
        runner = Runner(of)
        assert capped_slots(of, runner) == expected
        assert len(contexts) == 1
        assert max(contexts) <= 20
        without = msgspec.structs.replace(of, slots_context=0)
        assert capped_slots(without, runner) == 64
        # An engine without memory measures nothing.
        assert capped_slots(msgspec.structs.replace(of, released=True), runner) == 64


def test_more_sequences_are_not_measured_once_they_gain_hardly_any_tokens(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_step_s", lambda runner, batch, context: max(1.0, batch / 8))
    of = spec(path, max_slots=64, kv_tokens=8192)
    with torch.inference_mode():
        runner = Runner(of)
        until_saturated, all_of_them = (step_times(of, runner, context=each) for each in (20, 0))
    assert [step.batch for step in until_saturated] == [1, 2, 4, 8, 16]
    assert [step.batch for step in all_of_them] == [1, 2, 4, 8, 16, 32, 64]


def test_an_engine_reports_its_measured_limit_and_serves_as_without_it(path: str) -> None:
    plain, capped = (
        drive(
            spec(path, slots_context=context),
            [request("x", [3, 1, 4], seed=1, max_tokens=12)],
        )
        for context in (0, 16)
    )
    assert 1 <= capped.of(Ready)[0].max_slots <= plain.of(Ready)[0].max_slots
    assert capped.results["x"].tokens == plain.results["x"].tokens
