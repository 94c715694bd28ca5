"""The images that the tasks of a domain name for their sandboxes, as far as they are
known before the run.
"""

from collections.abc import Mapping
from typing import Any

from rollweave.envs.registry import is_handler, resolve
from rollweave.sandbox.base import HOST, is_reference
from rollweave.schema.base import copied


def images_of(env: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the images of a handler's sandboxes: those that its class method `images`
    lists, or its option `image`. Raises ConfigError, and what `images` raises.
    """
    if not is_handler(env):
        return ()
    method = getattr(resolve(env), "images", None)
    if method is not None:
        return tuple(image for image in method(copied(options)) if image != HOST)
    image = options.get("image")
    return (image,) if isinstance(image, str) and is_reference(image) else ()
