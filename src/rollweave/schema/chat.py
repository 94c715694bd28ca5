"""Messages between the agent and its environment. `rollout/chat/codec.py` turns them
into tokens.
"""

import itertools
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from rollweave.schema.base import Struct
from rollweave.schema.media import MESSAGE_IMAGES, Image

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(Struct, frozen=True, kw_only=True):
    """The agent calls tool `name`.

    `arguments` is a JSON object; `id` is what the tool's answer refers to.
    """

    id: str = ""
    name: str
    arguments: str = "{}"


class Message(Struct, frozen=True, kw_only=True):
    """One message of a conversation. `tool_calls` belong to an assistant's message,
    `tool_call_id` and optionally `name` to a tool's.

    `images` stand before the text, or where `image_places` says: image `i` before
    character `image_places[i]` of the content.

    `finish_reason` is "length" if a token limit cut what the agent sampled, else "".
    Chat templates do not see it. `thoughts` are what an assistant thought before it
    wrote the content; they stay in the content where the two are not divided.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    finish_reason: str = ""
    images: tuple[Image, ...] = ()
    image_places: tuple[int, ...] = ()
    thoughts: str = ""

    def __post_init__(self) -> None:
        if not self.images and not self.image_places:
            return
        if self.role == "assistant":
            raise ValueError(f"an assistant's message must have no images, got {len(self.images)}")
        if len(self.images) > MESSAGE_IMAGES:
            raise ValueError(
                f"a message must have at most {MESSAGE_IMAGES} images, got {len(self.images)}"
            )
        places = (0, *self.image_places, len(self.content))
        ascending = all(one <= other for one, other in itertools.pairwise(places))
        if self.image_places and (len(self.image_places) != len(self.images) or not ascending):
            raise ValueError(
                f"image_places must be ascending, in the text, and one for each of the "
                f"{len(self.images)} images, got {self.image_places}"
            )

    @property
    def chars(self) -> int:
        """The number of characters that a chat template may show."""
        calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in self.tool_calls)
        texts = (self.content, self.thoughts, self.tool_call_id, self.name)
        return calls + sum(map(len, texts))

    @property
    def places(self) -> tuple[int, ...]:
        """The characters of the content before which the images stand."""
        return self.image_places or (0,) * len(self.images)

    def parts(self) -> list[str | Image]:
        """Return the text and the images in their order, without empty text."""
        found: list[str | Image] = []
        start = 0
        for image, place in zip(self.images, self.places, strict=True):
            found += [self.content[start:place], image]
            start = place
        return [part for part in (*found, self.content[start:]) if part != ""]

    def without_data(self) -> "Message":
        """Return the message with references in place of its images."""
        if not self.images:
            return self
        return msgspec.structs.replace(
            self, images=tuple(image.reference() for image in self.images)
        )


def message_of(parts: Iterable[str | Image], *, role: Role, **fields: Any) -> Message:
    """Return the message with these parts. Raises ValueError for too many images."""
    text, images, places = "", list[Image](), list[int]()
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            images.append(part)
            places.append(len(text))
    return Message(
        role=role,
        content=text,
        images=tuple(images),
        image_places=tuple(places) if any(places) else (),
        **fields,
    )


def image_key(message: Message) -> tuple[object, ...]:
    """Return a key that is equal for the same images at the same places in the text."""
    if not message.images:
        return ()
    return (tuple(image.digest for image in message.images), message.places)
