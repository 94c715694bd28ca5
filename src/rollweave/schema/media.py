"""Images that are shown to the agent: their formats, limits and identity.

An image is a file's bytes, exactly as they were given. Only the engine decodes them.
Invariant: an `Image` with data has the digest and the media type of that data, so two
images are the same if, and only if, their digests are equal.
"""

import base64
import binascii
import hashlib
import struct
import zlib
from collections.abc import Iterable
from typing import Final, Self

from msgspec.structs import force_setattr

from rollweave.schema.base import Struct

IMAGE_BYTES: Final = 8 << 20
"""Maximum size of one image."""

MESSAGE_IMAGES: Final = 16
"""Maximum number of images of one message."""

PROMPT_IMAGES: Final = 128
"""Maximum number of images in the prompt of one turn."""

PROMPT_IMAGE_BYTES: Final = 64 << 20
"""Maximum size of the images in the prompt of one turn, all together."""

DIGEST_CHARS: Final = 64
"""Number of characters of a digest."""

PNG: Final = b"\x89PNG\r\n\x1a\n"
"""The first bytes of a PNG."""

SUFFIXES: Final = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/webp": "webp",
    "image/gif": "gif",
}
"""Media type of an image → the suffix of its file."""


TRAINS_TEXT: Final = (
    "the trainer computes text only; `rollweave serve` makes rollouts with images for another "
    "trainer, and `rollweave eval` evaluates them"
)
"""Why attempts that are trained on have no images."""


class Image(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image, identified by the SHA-256 of its bytes in hex. Without `data`, as in
    records, it refers to the file with this digest (`record/images.py`).
    """

    digest: str
    media_type: str
    data: bytes = b""

    def __post_init__(self) -> None:
        if self.media_type not in SUFFIXES:
            raise ValueError(f"an image must be {', '.join(SUFFIXES)}, got {self.media_type!r:.80}")
        if len(self.digest) != DIGEST_CHARS or not set(self.digest) <= set("0123456789abcdef"):
            raise ValueError(f"the digest of an image must be a SHA-256, got {self.digest!r:.80}")
        if not self.data:
            return
        if (kind := media_type_of(self.data)) != self.media_type:
            raise ValueError(f"an image of {self.media_type} must begin as one, got {kind}")
        if digest_of(self.data) != self.digest:
            raise ValueError(f"the data of an image must have its digest, {self.digest}")

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Return the image with these bytes: PNG, JPEG, WebP or GIF. Raises
        ValueError.
        """
        kind = media_type_of(data)
        image = cls(digest=digest_of(data), media_type=kind)
        force_setattr(image, "data", bytes(data))  # the check would compute the digest again
        return image

    @classmethod
    def of_base64(cls, text: str) -> Self:
        """Return the image with these bytes in base64. Raises ValueError."""
        try:
            return cls.of(base64.b64decode(text, validate=True))
        except binascii.Error as error:
            raise ValueError(f"an image must be base64: {error}") from error

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Return the image in a data: URL. Raises ValueError, also for any other URL:
        what it refers to may change after the agent has seen it.
        """
        scheme, _, rest = url.partition(":")
        head, comma, body = rest.partition(",")
        if scheme.lower() != "data":
            raise ValueError(f"an image must be in a data: URL, got {url!r:.80}")
        if not comma or not head.lower().startswith("image/") or not head.endswith(";base64"):
            raise ValueError(
                f"a data: URL of an image must begin with data:image/…;base64, got {url!r:.80}"
            )
        return cls.of_base64(body)

    @classmethod
    def of_pixels(cls, rgb: bytes, *, width: int) -> Self:
        """Return these pixels as a PNG; each has three bytes, row by row. Raises
        ValueError if the bytes are not whole rows.
        """
        row = 3 * width
        if width < 1 or not rgb or len(rgb) % row:
            raise ValueError(f"pixels must be rows of {width} × 3 bytes, got {len(rgb)} bytes")
        head = struct.pack(">IIBBBBB", width, len(rgb) // row, 8, 2, 0, 0, 0)
        lines = b"".join(b"\0" + rgb[at : at + row] for at in range(0, len(rgb), row))
        chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
        return cls.of(PNG + b"".join(_chunk(kind, body) for kind, body in chunks))

    @property
    def url(self) -> str:
        """The image as a data: URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.digest}.{SUFFIXES[self.media_type]}"

    def reference(self) -> Self:
        """Return the image without its data."""
        return type(self)(digest=self.digest, media_type=self.media_type) if self.data else self


class PlacedImage(Struct, frozen=True, kw_only=True):
    """An image of a sequence, and the index `at` of the token that stands for it: its
    placeholder.
    """

    at: int
    image: Image

    @property
    def key(self) -> tuple[int, str]:
        """Equal for the same image at the same place."""
        return self.at, self.image.digest

    def reference(self) -> Self:
        """Return the same with the image without its data."""
        return type(self)(at=self.at, image=self.image.reference())


def keys_of(images: Iterable[PlacedImage]) -> tuple[tuple[int, str], ...]:
    """Return a key that is equal for the same images at the same places."""
    return tuple(placed.key for placed in images)


def media_type_of(data: bytes) -> str:
    """Return the media type of an image by its first bytes. Raises ValueError if they
    are not those of an image, or if it is too large.
    """
    if len(data) > IMAGE_BYTES:
        raise ValueError(f"an image must have at most {IMAGE_BYTES} bytes, got {len(data)}")
    if data.startswith(PNG):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    raise ValueError(
        f"an image must be PNG, JPEG, WebP or GIF, got {len(data)} bytes that begin with "
        f"{data[:8]!r}"
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    """Return a chunk of a PNG."""
    check = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of the bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def prompt_error(images: Iterable[Image]) -> str:
    """Return which limit a prompt with these images exceeds, as a rule and the value
    that breaks it; "" if none.
    """
    sizes = [len(image.data) for image in images]
    if len(sizes) > PROMPT_IMAGES:
        return f"must have at most {PROMPT_IMAGES} images, got {len(sizes)}"
    if sum(sizes) > PROMPT_IMAGE_BYTES:
        return f"must have images of at most {PROMPT_IMAGE_BYTES} bytes, got {sum(sizes)}"
    return ""
