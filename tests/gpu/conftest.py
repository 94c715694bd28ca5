"""Tests of what runs on a GPU (`make gpu`). Each also runs on the CPU, which checks its
logic on machines without a GPU.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.support.forking import Forked

CUDA = pytest.param(
    "cuda",
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    """The device of engines and trainer."""
    name: str = request.param
    return name


@pytest.fixture(autouse=True, scope="session")
def forked_children() -> Iterator[None]:
    """Start child processes anew if there is a GPU: a forked one cannot use CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr("rollweave.io.child.Popen", Forked)
        yield
