"""The measurement of a model that other models may interrupt."""

from collections.abc import Generator
from pathlib import Path

import torch

from rollweave.core.policy.admission import Curve
from rollweave.engine.coserving.tenant import STEPS, measure_curve, measure_profile
from rollweave.engine.runner import Runner
from rollweave.schema.base import EngineId
from rollweave.schema.serving import EngineSpec
from tests.support.tiny_models import build, save

SIZES = (2, 4, 8)


class Steps:
    """Steps that take a tenth of a second per unit of size; the first one a second."""

    def __init__(self) -> None:
        self.computed: list[int] = []
        self.ended: list[int] = []

    def of(self, size: int) -> Generator[float, None, None]:
        try:
            self.computed.append(size)
            yield 1.0
            while True:
                self.computed.append(size)
                yield 0.1 * size
        finally:
            self.ended.append(size)


def measured(steps: Steps, fits: list[bool]) -> tuple[Curve, list[float]]:
    """Answer each question in turn, and return the curve and what was expected."""
    curve = measure_curve(SIZES, steps.of)
    expected = [next(curve)]
    try:
        for answer in fits:
            expected.append(curve.send(answer))
    except StopIteration as end:
        return end.value, expected
    raise AssertionError(f"it asks for more after {expected}")


def test_each_size_is_measured_after_a_step_that_does_not_count() -> None:
    steps = Steps()
    curve, expected = measured(steps, [True] * 3 * (1 + STEPS))
    assert curve == Curve(((2, 0.2), (4, 0.4), (8, 0.8)))
    assert steps.computed == [size for size in SIZES for _ in range(1 + STEPS)]
    assert steps.ended == list(SIZES)
    assert expected[0] == 0  # nothing is known
    # a size is expected to take in proportion to the one before, then what it took
    assert expected[1 + STEPS : 2 * (1 + STEPS)] == [0.4, 1.0, 0.4, 0.4]


def test_a_size_that_serving_cannot_wait_for_is_left_out_with_larger_ones() -> None:
    steps = Steps()
    curve, _ = measured(steps, [True] * (1 + STEPS) + [True, True, False])
    assert curve == Curve(((2, 0.2),))
    assert steps.computed == [2] * (1 + STEPS) + [4, 4]
    assert steps.ended == [2, 4]


def test_the_smallest_size_is_measured_in_any_case() -> None:
    steps = Steps()
    curve, _ = measured(steps, [False] * (2 + STEPS))
    assert curve == Curve(((2, 0.2),))


def test_a_group_smaller_than_a_prompt_is_enough_to_measure_all_sizes(tmp_path: Path) -> None:
    spec = EngineSpec(
        id=EngineId("e"), model=save(build("qwen3"), tmp_path), kv_tokens=4096, block_tokens=16
    )
    with torch.inference_mode():
        runner = Runner(spec)
        profile = measure_profile(runner, blocks=2, slots=20)
    # its context has 512 tokens
    assert [size for size, _ in profile.chunked.points] == [16, 32, 64, 128, 256]
    assert [size for size, _ in profile.decode.points] == [1, 2, 4, 8, 16]
    assert not runner.pool.data.any(), "a model reads what the measurement has left"
