"""Fixtures of the trainer's tests."""

from pathlib import Path

import pytest

from tests.support.trainers import make_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of the native implementation, which no test changes."""
    return make_model(tmp_path_factory.mktemp("model") / "m")
