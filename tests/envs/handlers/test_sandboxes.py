"""The images of sandboxes stay in the cache as long as they are used."""

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollweave.envs.handlers import sandboxes as module
from rollweave.envs.handlers.sandboxes import AttemptSandboxes, NotCachedError, Sandboxes
from rollweave.sandbox.base import Backend, SandboxSpec
from rollweave.schema.errors import ImageError
from rollweave_sandbox.image_cache import ImageCache, Lease

DIGEST = "0" * 64
SPEC = SandboxSpec(image=f"sha256:{DIGEST}")


class Box:
    ended = ""

    async def stop(self, grace_s: float = 2.0) -> None: ...


class Boxes:
    """A back end that records the images of its sandboxes."""

    def __init__(self) -> None:
        self.images: list[str] = []

    async def start(self, spec: SandboxSpec) -> Any:
        self.images.append(spec.image)
        return Box()

    async def close(self) -> None: ...


class Cached:
    """The images of a cache."""

    def __init__(self, cache: ImageCache) -> None:
        self._cache = cache

    async def find(self, text: str) -> Lease | None:
        return self._cache.find(text.removeprefix("sha256:"))

    async def take(self, text: str, backend: Callable[[], Backend]) -> Lease:
        lease = await self.find(text)
        assert lease is not None
        return lease

    async def close(self) -> None: ...


@pytest.fixture
def cache(tmp_path: Path) -> ImageCache:
    """A cache with an image, which is larger than the limit."""
    made = ImageCache(tmp_path, limit_bytes=1)
    root = tmp_path / "roots" / DIGEST
    root.mkdir(parents=True)
    (root / "file").write_bytes(bytes(1 << 14))
    return made


@pytest.fixture
def boxes(monkeypatch: pytest.MonkeyPatch) -> Boxes:
    made = Boxes()
    monkeypatch.setattr(module, "provider", lambda _: SimpleNamespace(backend=lambda _: made))
    return made


def in_use(cache: ImageCache) -> bool:
    try:
        cache.make_room(0)
    except ImageError:
        return True
    return False


async def test_an_image_stays_until_its_attempt_is_over(cache: ImageCache, boxes: Boxes) -> None:
    sandboxes = Sandboxes(images=lambda: Cached(cache))
    first, second = AttemptSandboxes(sandboxes), AttemptSandboxes(sandboxes)
    await first.start(SPEC)
    await second.start(SPEC)
    (path,) = set(boxes.images)
    assert path.endswith(f"/roots/{DIGEST}")
    del first
    gc.collect()
    assert in_use(cache)
    del second
    gc.collect()
    assert not in_use(cache)
    await sandboxes.close()


async def test_an_image_stays_for_warm_sandboxes(cache: ImageCache, boxes: Boxes) -> None:
    sandboxes = Sandboxes(images=lambda: Cached(cache), warm=1)
    attempt = AttemptSandboxes(sandboxes)
    await attempt.start(SPEC)
    del attempt
    gc.collect()
    assert in_use(cache)
    await sandboxes.close()
    assert not in_use(cache)


async def test_only_what_is_cached_is_used_if_nothing_else_may(
    cache: ImageCache, boxes: Boxes
) -> None:
    sandboxes = Sandboxes(images=lambda: Cached(cache), cached_only=True)
    await sandboxes.start(SPEC)
    with pytest.raises(NotCachedError, match=r"image sha256:1{64} is not in the cache"):
        await sandboxes.start(SandboxSpec(image=f"sha256:{'1' * 64}"))
    await sandboxes.close()
    assert not in_use(cache)
    with pytest.raises(ImageError, match="image must be a folder without a cache of images"):
        await Sandboxes().start(SPEC)
