"""Check the images that the tasks name, before a run needs them."""

import os
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

from rollweave.runtime.images import cache_folder
from rollweave.runtime.preflight.checks import Check, Status, fail, ok, warn
from rollweave.sandbox import image_reference
from rollweave.sandbox.blobs import ROUTE, Source, read_text
from rollweave.sandbox.image_reference import BACKENDS, Reference
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError

SHOWN = 5
"""Maximum number of images of a task domain that are listed."""

CHECKED = 100
"""Maximum number of images of a task domain that are checked: each may cost a
request.
"""


def examine_images(config: RunConfig, index: int, images: Sequence[str]) -> Iterator[Check]:
    """Check the images of task domain number `index`."""
    where, backend = f"tasks.{index} image", config.sandbox.backend or BACKENDS[0]
    if not images:
        return
    if backend not in BACKENDS:
        yield fail(
            "sandbox.backend",
            f"must be {' or '.join(BACKENDS)} for the image {images[0]}, got {backend}",
        )
        return
    failed = shown = 0
    for image in images[:CHECKED]:
        check = _check(config, where, image)
        failed += check.status is Status.FAIL
        if (check.status is Status.FAIL and failed <= SHOWN) or shown < SHOWN:
            shown += 1
            yield check
    if (more := len(images) - shown) > 0:
        yield (fail if failed > SHOWN else ok)(where, f"and {more} more")


def _check(config: RunConfig, where: str, image: str) -> Check:
    remote = config.cluster is not None and config.workers.count > 0
    try:
        reference = image_reference.parse(image, Path.cwd())
        if remote:
            _check_reaches_hosts(image, reference)
        detail = image_reference.check(reference)
    except ConfigError as error:
        if remote and image.startswith("/"):
            return warn(where, f"not checked, since it need not be on this machine: {error}")
        return fail(where, str(error).removeprefix("image "))
    if reference.digest:
        return _check_source(config, where, reference, remote=remote)
    return ok(where, detail)


def _check_reaches_hosts(image: str, reference: Reference) -> None:
    """Raise ConfigError for files that do not reach the hosts of a cluster."""
    recipe = reference.recipe
    if image.startswith("/"):
        return
    relative = [name for name in reference.names() if not name.startswith("/")]
    for path in (Path(image), *(reference.place / name for name in relative)):
        path = Path(os.path.normpath(Path.cwd() / path))
        if not path.is_relative_to(Path.cwd()):
            raise ConfigError(
                f"image {image} must have its files below the working directory with [cluster], "
                f"or be an absolute path, got {path}"
            )
    if (
        recipe is not None
        and not recipe.base.startswith("/")
        and (reference.place / recipe.base).is_dir()
    ):
        raise ConfigError(
            f"image {image}: base must be an archive, sha256:DIGEST or an absolute path with "
            f"[cluster], got the folder {recipe.base}"
        )


def _check_source(config: RunConfig, where: str, reference: Reference, *, remote: bool) -> Check:
    """Check that the cache or the mirror has an image of this digest."""
    digest, mirror = reference.digest, config.sandbox.mirror
    folder = cache_folder(config.sandbox)
    if (folder / "roots" / digest).is_dir():
        return ok(where, f"{reference.text} is in {folder}")
    if mirror is None:
        text = f"must be in {folder}, or in a sandbox.mirror, got {reference.text}"
        return (warn if remote else fail)(where, text)
    try:
        has_it = read_text(Source(url=mirror), ROUTE + digest) is not None
    except HTTPError as error:
        text = f"sandbox.mirror {mirror} answered {error.code} {HTTPStatus(error.code).phrase}"
        return (warn if remote else fail)(where, text)
    except OSError as error:
        text = f"sandbox.mirror {mirror} must be reachable, got {error}"
        return (warn if remote else fail)(where, text)
    if not has_it:
        return fail(where, f"must be in the mirror {mirror}, got {reference.text}")
    return ok(where, f"{reference.text} from {mirror}")
