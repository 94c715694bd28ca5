"""A tiny checkpoint, for gateways and fronts of a real engine."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.real_gateway import checkpoint  # needs torch

    return checkpoint(tmp_path_factory.mktemp("model"))
