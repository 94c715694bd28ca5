"""The implementation that this distribution announces: `Provider` of Rollweave's
`sandbox/provider.py`, for the sandboxes of this machine.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from rollweave.sandbox.base import Backend
from rollweave.sandbox.provider import Images, Peers, Provider
from rollweave_sandbox import registry
from rollweave_sandbox.cgroups import WITHOUT, unbounded
from rollweave_sandbox.folders import check_folder
from rollweave_sandbox.host_images import HostImages, locate_image
from rollweave_sandbox.packages import distributions, installed


class Local:
    """Sandboxes of this machine."""

    image_backends: tuple[str, ...] = ("bubblewrap", "apptainer")

    def backend(self, name: str | None = None) -> Backend:
        return registry.backend(name)

    def images(
        self,
        mirror: str | None,
        *,
        clock: Callable[[], float],
        here: Path,
        peers: Peers | None,
        run: str,
    ) -> Images:
        return HostImages(mirror, clock=clock, here=here, peers=peers, run=run)

    def locate_image(self, digest: str, mirror: str | None) -> str:
        return locate_image(digest, mirror)

    def check_contents(self, *, packages: Sequence[str] = (), folder: str = "") -> None:
        _check_packages(tuple(packages))
        if folder:
            check_folder(folder)

    def installed(self, *names: str) -> tuple[str, ...]:
        return installed(*names)

    def missing_limits(self) -> tuple[str, ...]:
        return tuple(
            f"no control group for {name} ({reason}): {WITHOUT[name]}"
            for name, reason in unbounded().items()
        )


@functools.lru_cache(64)
def _check_packages(names: tuple[str, ...]) -> None:
    distributions(names)


PROVIDER: Provider = Local()
