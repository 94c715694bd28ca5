"""What is an image, and where the images of a message stand."""

import base64
import hashlib
import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.schema.chat import Message, message_of
from rollweave.schema.media import (
    IMAGE_BYTES,
    MESSAGE_IMAGES,
    PROMPT_IMAGE_BYTES,
    PROMPT_IMAGES,
    Image,
    prompt_error,
)
from tests.support.vision_models import picture

PNG = picture(200, 10, 10)
HEADS = {
    "image/png": PNG[:8],
    "image/jpeg": b"\xff\xd8\xff\xe0",
    "image/webp": b"RIFF\x00\x00\x00\x00WEBP",
    "image/gif": b"GIF89a",
}


@pytest.mark.parametrize("kind", HEADS)
def test_the_first_bytes_say_the_media_type(kind: str) -> None:
    image = Image.of(HEADS[kind] + b"rest")
    assert image.media_type == kind
    assert Image.of_url(image.url) == image


def test_an_image_has_the_digest_and_a_copy_of_its_bytes() -> None:
    data = bytearray(PNG)
    image = Image.of(bytes(data))
    same = Image.of(data)  # type: ignore[arg-type]
    data[-1] ^= 1
    assert image == same == Image(digest=image.digest, media_type="image/png", data=PNG)
    assert image.digest == hashlib.sha256(PNG).hexdigest()
    with pytest.raises(ValueError, match="must have its digest"):
        Image(digest=image.digest, media_type="image/png", data=bytes(data))


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "must be PNG, JPEG, WebP or GIF, got 0 bytes"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "must be PNG, JPEG, WebP or GIF"),
        (PNG[:8] + bytes(IMAGE_BYTES), f"must have at most {IMAGE_BYTES} bytes"),
    ],
)
def test_what_is_no_image_is_refused(data: bytes, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Image.of(data)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png",
        "file:///etc/passwd",
        "data:text/plain;base64,aGk=",
        "data:image/png,raw",
        "data:image/png;base64,???",
        "",
    ],
)
def test_only_data_urls_of_images_are_read(url: str) -> None:
    with pytest.raises(ValueError, match=r"^an? .*image"):
        Image.of_url(url)


def test_data_of_another_digest_or_type_is_refused_wherever_it_is_decoded() -> None:
    good = Image.of(PNG)
    for changed in ({"data": PNG + b"x"}, {"media_type": "image/gif"}, {"digest": "0" * 64}):
        with pytest.raises(ValueError, match="must"):
            msgspec.structs.replace(good, **changed)
    encoded = msgspec.msgpack.encode(good).replace(PNG[-8:], b"12345678")
    with pytest.raises(msgspec.ValidationError, match="must have its digest"):
        msgspec.msgpack.decode(encoded, type=Image)


def test_a_reference_has_no_data_in_json() -> None:
    written = msgspec.json.encode(Image.of(PNG).reference())
    assert b"data" not in written
    assert base64.b64encode(PNG[:30]) not in written


parts = st.lists(
    st.one_of(
        st.text(max_size=5),
        st.integers(0, 3).map(lambda number: Image.of(HEADS["image/gif"] + bytes([number]))),
    ),
    max_size=8,
)


@given(parts)
def test_parts_keep_their_order(given_parts: list[str | Image]) -> None:
    expected: list[str | Image] = []
    for part in given_parts:  # the slow way: join neighbors, drop empty text
        if isinstance(part, str) and expected and isinstance(expected[-1], str):
            expected[-1] += part
        else:
            expected.append(part)
    expected = [part for part in expected if part != ""]
    joined: list[str | Image] = []
    for part in expected:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    message = message_of(given_parts, role="user")
    assert message.parts() == joined
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message) == message


def test_images_stand_before_the_text_by_default() -> None:
    one = Image.of(PNG)
    assert Message(role="tool", content="hi", images=(one, one)).parts() == [one, one, "hi"]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"role": "assistant"}, "assistant's message must have no images"),
        ({"image_places": (3,)}, "image_places must be ascending"),
        ({"image_places": (0, 1)}, "image_places must be ascending"),
        ({"images": (Image.of(PNG),) * (MESSAGE_IMAGES + 1)}, "at most 16 images, got 17"),
        ({"images": (), "image_places": (0,)}, "image_places must be"),
    ],
)
def test_images_where_they_cannot_be_are_refused(changes: dict[str, object], rule: str) -> None:
    message = Message(role="user", content="hi", images=(Image.of(PNG),))
    with pytest.raises(ValueError, match=rule):
        msgspec.structs.replace(message, **changes)


def test_a_prompt_has_limits() -> None:
    assert prompt_error([Image.of(PNG)] * PROMPT_IMAGES) == ""
    assert "at most 128 images" in prompt_error([Image.of(PNG)] * (PROMPT_IMAGES + 1))
    large = Image.of(PNG + bytes(IMAGE_BYTES - len(PNG)))
    count = PROMPT_IMAGE_BYTES // IMAGE_BYTES
    assert prompt_error([large] * count) == ""
    assert "bytes, got" in prompt_error([large] * (count + 1))


def test_pixels_become_a_png() -> None:
    pictures = pytest.importorskip("PIL.Image")
    rgb = bytes(range(2 * 3 * 3))
    with pictures.open(io.BytesIO(Image.of_pixels(rgb, width=2).data)) as opened:
        assert (opened.size, opened.mode, opened.tobytes()) == ((2, 3), "RGB", rgb)
    for wrong, width in ((b"", 1), (rgb, 4), (rgb, 0)):
        with pytest.raises(ValueError, match="pixels must be rows"):
            Image.of_pixels(wrong, width=width)
