"""What several tests of the engine need."""

from collections.abc import Iterator

import pytest

from rollweave.weights.publication import Publisher


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher(keep=9)
    yield made
    made.close()
