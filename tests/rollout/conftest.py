"""Fixtures of the pipeline: everything about it holds for a worker in its process and
in another one.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollweave.record.store import TrajectoryStore
from tests.support.judge_server import FakeServer
from tests.support.pipelines import Harness


@pytest.fixture(params=[False, True], ids=["here", "wired"])
def wired(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harness, "wired", request.param)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without long pauses."""
    monkeypatch.setattr("rollweave.rollout.http_service.FIRST_RETRY_S", 0.01)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TrajectoryStore]:
    with TrajectoryStore(tmp_path / "trajectories") as opened:
        yield opened


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    """Return a judge, or the URL of a reward, that answers what a test says."""
    fake = FakeServer()
    await fake.start()
    yield fake
    await fake.stop()
