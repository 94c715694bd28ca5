"""The measured payloads are what their names say (bfloat16, masks, entropy), and
a wrong result is counted.
"""

import numpy as np
import pytest
import torch

from benchmarks.delta import DeltaMeasurement, entropy, figures_of, measure
from benchmarks.delta_payloads import Versions, bfloat16, masked


def test_bfloat16_is_torchs() -> None:
    values = np.random.default_rng(0).normal(0, 1, 10_000).astype(np.float32)
    values[:4] = 0.0, -0.0, 1.00390625, 1.01171875  # halfway between two
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bfloat16(values), theirs)


def test_a_mask_changes_its_share_of_elements_by_one() -> None:
    versions = masked(np.random.default_rng(0), 100_000, 0.1)
    steps = np.abs(versions.new.astype(np.int64) - versions.base.astype(np.int64))
    assert set(steps.tolist()) == {0, 1}
    assert steps.mean() == pytest.approx(0.1, abs=0.01)


def test_entropy_of_known_sources() -> None:
    """Half of the elements change: one bit for each element, so 2 for each change, and
    one bit for its direction.
    """
    base = np.full(100_000, 1000, np.uint16)
    new = base.copy()
    new[::4] += 1
    new[2::4] -= 1
    assert entropy(Versions(base, new)) == pytest.approx(3 / 8)


def test_ratios_divide_by_the_alternative() -> None:
    versions = Versions(
        np.zeros(1000, np.uint16), np.repeat(np.array([1, 0], np.uint16), [10, 990])
    )
    measurement = DeltaMeasurement(
        nbytes=15, forms={"sparse": 1}, mismatches=0, copy_s=1.0, encode_s=4.0, apply_s=2.0
    )
    values = figures_of(versions, measurement)
    assert (values["changed"], values["bytes_per_changed"]) == (0.01, 1.5)
    assert (values["ratio_to_coo"], values["ratio_to_dense"]) == (0.25, 0.0075)
    assert (values["encode_over_memcpy"], values["apply_over_memcpy"]) == (0.25, 0.5)


def test_a_measurement_verifies_its_result() -> None:
    measurement = measure(masked(np.random.default_rng(0), 10_000, 0.01), rounds=1)
    assert (measurement.mismatches, measurement.forms) == (0, {"sparse": 1})
    assert measurement.nbytes < 400
    assert min(measurement.copy_s, measurement.encode_s, measurement.apply_s) > 0
