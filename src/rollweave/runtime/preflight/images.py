"""Check the images that the tasks name, before a run needs them."""

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

from rollweave.runtime.hosts import user_files
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
            user_files.check_image(image, reference)
        detail = image_reference.check(reference)
    except ConfigError as error:
        if remote and image.startswith("/"):
            return warn(where, f"not checked, since it need not be on this machine: {error}")
        return fail(where, str(error).removeprefix("image "))
    if reference.digest:
        return _check_source(config, where, reference, remote=remote)
    return ok(where, detail)


def _check_source(config: RunConfig, where: str, reference: Reference, *, remote: bool) -> Check:
    """Check that the cache or the mirror has an image of this digest."""
    digest, mirror = reference.digest, config.sandbox.mirror
    folder = cache_folder()
    if (folder / "roots" / digest).is_dir():
        return ok(where, f"{reference.text} is in {folder}")
    if mirror is None:
        problem = f"must be in {folder}, or in a sandbox.mirror, got {reference.text}"
    else:
        try:
            if read_text(Source(url=mirror), ROUTE + digest) is not None:
                return ok(where, f"{reference.text} from {mirror}")
            return fail(where, f"must be in the mirror {mirror}, got {reference.text}")
        except HTTPError as error:
            phrase = HTTPStatus(error.code).phrase
            problem = f"sandbox.mirror {mirror} answered {error.code} {phrase}"
        except OSError as error:
            problem = f"sandbox.mirror {mirror} must be reachable, got {error}"
    return (warn if remote else fail)(where, problem)
