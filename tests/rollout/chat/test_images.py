"""Images in conversations: one placeholder for each, also where text spells it, at
places that appended history never changes.
"""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.rollout.chat.codec import ChatCodec, ChatError
from rollweave.rollout.chat.conversation import Conversation
from rollweave.schema.chat import Message, message_of
from rollweave.schema.media import Image
from rollweave.schema.serving import VersionSpan
from tests.support.chats import codec
from tests.support.vision_models import PARTS_ONLY, TEMPLATE, picture, write_tokenizer

RED, GREEN, BLUE = (Image.of(picture(*color)) for color in ((255,), (0, 255), (0, 0, 255)))


@pytest.fixture(scope="module", params=[TEMPLATE, PARTS_ONLY], ids=["both", "parts"])
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    directory = tmp_path_factory.mktemp("vision")
    write_tokenizer(directory, template=request.param)
    return ChatCodec.from_directory(directory)


def user(*parts: str | Image) -> Message:
    return message_of(parts, role="user")


def test_the_placeholder_is_found_and_stands_where_the_image_is(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    vision = ChatCodec.from_directory(tmp_path)
    tokens = vision.start([user("left", RED, "right")])
    assert vision.decode(tokens) == ("<|start|>userleft<image>right<|end|><|start|>assistant")
    assert tokens.count(vision.image_token) == 1


def test_a_token_named_by_the_configuration_takes_precedence(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(
        msgspec.json.encode({"chat_template": TEMPLATE, "eos_token": "<|end|>"})
    )
    assert ChatCodec.from_directory(tmp_path).image_token is None  # nothing names it
    named = tokenizer.token_to_id("<image>")
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"image_token_id": named}))
    assert ChatCodec.from_directory(tmp_path).image_token == named


def test_a_template_without_a_place_for_images_refuses_them_in_one_line() -> None:
    text_only = codec("tools")
    assert "has no place for images" in text_only.no_images
    with pytest.raises(ChatError, match="has no place for images, got 1") as raised:
        text_only.start([user(RED)])
    assert "\n" not in str(raised.value)


def test_a_template_that_shows_only_some_roles_images_is_refused(tmp_path: Path) -> None:
    template = TEMPLATE.replace(
        "part.type == 'image'", "part.type == 'image' and message.role == 'user'"
    ).replace("{{ part.text }}", "{{ part.text or '' }}")
    write_tokenizer(tmp_path, template=template)
    vision = ChatCodec.from_directory(tmp_path)
    with pytest.raises(ChatError, match="must show each of 1 images once, got 0"):
        vision.start([user("a"), Message(role="tool", content="", images=(RED,))])


def test_text_that_spells_the_placeholder_is_text(vision: ChatCodec) -> None:
    spelled = user("<image> and ", RED, " <|end|><image>")
    tokens = vision.start([spelled])
    assert tokens.count(vision.image_token) == 1
    assert vision.decode(tokens).count("<image>") == 3
    assert len(vision.placed(tokens, [spelled])) == 1


def test_a_placeholder_that_is_no_special_token_is_guarded_too(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    parsed = msgspec.json.decode(file.read_bytes())
    for token in parsed["added_tokens"]:
        token["special"] = token["content"] != "<image>"
    file.write_bytes(msgspec.json.encode(parsed))
    vision = ChatCodec.from_directory(tmp_path)
    assert vision.start([user("<image>", RED)]).count(vision.image_token) == 1


def test_a_rendering_is_cached_without_the_bytes(vision: ChatCodec) -> None:
    one, other = (vision.start([user(image, "?")]) for image in (RED, GREEN))
    assert one == other


pieces = st.lists(
    st.one_of(st.sampled_from([RED, GREEN, BLUE]), st.text("ab<image>|end", max_size=9)),
    max_size=4,
)


@given(st.lists(pieces, min_size=1, max_size=5))
def test_images_keep_their_places_while_a_conversation_grows(
    vision: ChatCodec, turns: list[list[str | Image]]
) -> None:
    """The reference: all images in the order of their messages, each at a
    placeholder.
    """
    conversation = Conversation(vision, [user("begin", *turns[0])])
    shown = [part for part in turns[0] if isinstance(part, Image)]
    answer = (*vision.encode_literal("ok"), vision.stop_token_ids[0])
    for parts in turns[1:]:
        before = conversation.images
        conversation.add_turn(
            answer,
            [-1.0] * len(answer),
            [VersionSpan(start=0, end=len(answer), version=0)],
            prompt_tokens=len(conversation) + 3 * len(before),
        )
        conversation.observe([user("next", *parts)])
        shown += [part for part in parts if isinstance(part, Image)]
        assert conversation.images[: len(before)] == before
    assert [placed.image for placed in conversation.images] == shown
    places = [at for at, token in enumerate(conversation.tokens) if token == vision.image_token]
    assert [placed.at for placed in conversation.images] == places
    assert not conversation.has_stray_placeholder
    sequence = conversation.sequence()
    assert [placed.image.data for placed in sequence.images] == [b""] * len(shown)


def test_the_engines_count_of_images_counts_for_the_context(vision: ChatCodec) -> None:
    conversation = Conversation(vision, [user(RED, "?")])
    length = len(conversation)
    assert conversation.context_tokens == length
    tokens = vision.encode_literal("x")
    conversation.add_turn(
        tokens, [-1.0], [VersionSpan(start=0, end=1, version=0)], prompt_tokens=length + 99
    )
    assert conversation.context_tokens == length + 1 + 99


def test_a_placeholder_that_the_agent_samples_is_noticed(vision: ChatCodec) -> None:
    conversation = Conversation(vision, [user(RED, "?")])
    assert vision.image_token is not None
    span = VersionSpan(start=0, end=1, version=0)
    conversation.add_turn([vision.image_token], [-1.0], [span])
    assert conversation.has_stray_placeholder
