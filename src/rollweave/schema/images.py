"""Messages about images of sandboxes between rollout workers and the controller, from
which each worker learns the hosts that have an image (`core/policy/images.py`).

A `key` names an image even before its digest is known: it is the key of a recipe, or a
digest.
"""

from rollweave.schema.base import Struct, TaggedStruct


class ImagePeer(Struct, frozen=True, kw_only=True):
    """A worker from which others fetch images: its URL, and the token for it."""

    host: str
    """Name of its host."""
    url: str
    token: str


class AskImage(TaggedStruct, frozen=True, kw_only=True):
    """Ask where to get an image. Answered by `GrantImage`, once there is a source.

    With `alone`, the sources of an earlier answer have failed, so that this worker may
    get the image from outside, even if others have it.
    """

    key: str
    alone: bool = False


class HoldImage(TaggedStruct, frozen=True, kw_only=True):
    """This worker's host has the image, and serves it at `peer`, if that is given."""

    key: str
    digest: str
    peer: ImagePeer | None = None


class MissImage(TaggedStruct, frozen=True, kw_only=True):
    """This worker could not get the image from the sources that it was granted."""

    key: str


ImageReport = AskImage | HoldImage | MissImage


class GrantImage(TaggedStruct, frozen=True, kw_only=True):
    """Fetch the image from one of `peers`, preferably the first.

    The `origin` gets it from outside instead: from the mirror, or by building it.
    """

    key: str
    digest: str = ""
    peers: tuple[ImagePeer, ...] = ()
    origin: bool = False


class ImageWait(Struct, frozen=True, kw_only=True):
    """A worker waits for an image since `since`, on its clock.

    With `behind`, another process of its host gets the image.
    """

    image: str
    what: str
    since: float
    behind: bool = False
