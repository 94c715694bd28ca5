"""Everything about the pipeline holds for a worker in its process and in another
one.
"""

import pytest

from tests.support.pipelines import Harness


@pytest.fixture(params=[False, True], ids=["here", "wired"])
def wired(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harness, "wired", request.param)
