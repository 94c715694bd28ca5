"""The interface to an implementation of sandboxes, and the function that finds the
implementation.

The implementation is a distribution of its own: in this repository `rollweave-sandbox`,
for sandboxes of this machine. A distribution announces each of its back ends by an
entry point of the group `rollweave.sandboxes`, which has the name of the back end and
leads to a `Provider`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from rollweave.io.extras import announced
from rollweave.sandbox.base import Backend
from rollweave.schema.images import GrantImage, ImageReport, ImageWait

GROUP = "rollweave.sandboxes"

DISTRIBUTION = "rollweave-sandbox"
"""The distribution in this repository that announces `DEFAULT`."""

DEFAULT = "bubblewrap"


class Lease(Protocol):
    """An image that is held until `close`."""

    path: str
    """Folder of the image, for `SandboxSpec.image`."""

    def copy(self) -> "Lease":
        """Hold the image a second time, and return the new lease."""

    def close(self) -> None:
        """Release the image, now or soon afterwards. A second call does nothing.

        The garbage collector may call this method, in the middle of any other code.
        """


class Images(Protocol):
    """The images of one process. The name of an image is a reference
    (`base.is_reference`) or the path of a folder.

    All calls belong to the event loop's thread.
    """

    async def find(self, text: str) -> Lease | None:
        """Hold an image of this host's cache; return None if the cache lacks it.

        Raises ConfigError, ImageError.
        """

    async def take(self, text: str, backend: Callable[[], Backend]) -> Lease:
        """Return an image, from any source that has it. If no source has the image,
        the back end that `backend` returns builds it.

        Raises ConfigError for a name that no image can have, ImageError.
        """

    def waits(self) -> tuple[ImageWait, ...]:
        """Return the images that are being waited for."""

    def on_granted(self, message: GrantImage) -> None:
        """Take the controller's answer to a message that was reported to `Peers`."""

    async def close(self) -> None:
        """End all that is under way, and release all images."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The other hosts of a run, with which a worker exchanges images."""

    report: Callable[[ImageReport], None]
    """Sends the controller a question or a report about an image."""
    host: str
    """Name of this host."""
    address: str
    """Address at which this host serves its images to the others; "" if it serves
    none.
    """


class Provider(Protocol):
    """An implementation of sandboxes."""

    image_backends: tuple[str, ...]
    """Names of the back ends whose sandboxes can have images other than the host's."""

    def backend(self, name: str | None = None) -> Backend:
        """Return the back end called `name`, or the default back end.

        Raises ConfigError for an unknown name, and SandboxError, which says what to
        install, if the back end is not installed.
        """

    def images(
        self,
        mirror: str | None,
        *,
        clock: Callable[[], float],
        here: Path,
        peers: Peers | None,
        run: str,
    ) -> Images:
        """Open the images of this process, for the run with the id `run`. `mirror` is
        the setting `sandbox.mirror`. Relative paths of images start at `here`. `peers`
        is None if the run has no other hosts. Raises ImageError.
        """

    def locate_image(self, digest: str, mirror: str | None) -> str:
        """Return where the image with this SHA-256 is: in this host's cache, or in the
        mirror. May wait for the mirror.

        Raises ImageError if the mirror has no such image, and ConfigError if this host
        alone cannot tell whether a host of the run has it.
        """

    def check_contents(self, *, packages: Sequence[str] = (), folder: str = "") -> None:
        """Raise ConfigError if no sandbox can have these `packages` or this `folder` of
        this machine (`SandboxSpec`).
        """

    def installed(self, *names: str) -> tuple[str, ...]:
        """Return the Python packages among `names` that sandboxes on the image HOST can
        have.
        """

    def missing_limits(self) -> tuple[str, ...]:
        """Return which limits this machine does not enforce on a sandbox as a whole,
        with the reasons and the consequences; empty if it enforces all.
        """


@functools.cache
def provider(backend: str | None = None) -> Provider:
    """Return the implementation of a back end, by default of `DEFAULT`. A name that no
    distribution announces gives the implementation of `DEFAULT`, which refuses the name
    (`Provider.backend`).

    Raises ConfigError if no distribution announces back ends, if two announce the same,
    or if this host does not run the user's code and another distribution than this
    repository's announces the back end.
    """
    found = announced(
        GROUP,
        backend or DEFAULT,
        DEFAULT,
        field="sandbox back end",
        distribution=DISTRIBUTION,
        needing="a sandbox",
    )
    return cast(Provider, found)
