"""What ends the agent's turn, and what follows: for templates and tokenizers of several
families.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.rollout.chat.codec import ChatCodec, ChatError
from rollweave.rollout.chat.text import pattern_of
from rollweave.schema.chat import Message, ToolCall
from tests.support.chat_families import TOOLS, checkpoint, result, user
from tests.support.chats import CHATML
from tests.support.tokenizer_forms import BOS, EOS, FORMS

Make = Callable[[str, str], ChatCodec]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def of(template: str, form: str) -> ChatCodec:
        return ChatCodec.from_directory(checkpoint(tmp_path, template, form))

    return of


@pytest.mark.parametrize(
    ("template", "form", "tokens", "stop"),
    [
        ("chatml", "byte_level", ["<|im_end|>"], ()),
        ("chatml", "markers_that_are_not_special", ["<|im_end|>"], ()),
        ("llama2", "sentencepiece", [], ()),
        ("phi3", "stripping_markers", ["<|end|>"], ()),
        ("llama3_eom", "byte_level", ["<|eot_id|>", "<|eom_id|>"], ()),
        ("glm45", "byte_level", ["<|user|>", "<|observation|>"], ()),
        ("user_assistant", "sentencepiece", [], ("\n",)),
        ("user_assistant", "sentencepiece_of_llama", [], ("\n",)),
        ("user_assistant_space", "sentencepiece", [], (" USER:",)),
        ("falcon", "unigram", [], ("\nUser:",)),
    ],
)
def test_a_turn_ends_at_an_added_token_or_a_text(
    make: Make, template: str, form: str, tokens: list[str], stop: tuple[str, ...]
) -> None:
    codec = make(template, form)
    ends = [codec.tokenizer.id_to_token(id) for id in codec.stop_token_ids]
    assert ends[: len(tokens)] == tokens
    added = codec.tokenizer.get_added_tokens_decoder()
    assert set(codec.stop_token_ids[: len(tokens)]) <= added.keys()
    assert set(ends) == {*tokens, EOS, codec.tokenizer.id_to_token(1)}  # config.json's is 1
    assert codec.stop == stop


@pytest.mark.parametrize("form", ["byte_level", "sentencepiece", "stripping_markers"])
@pytest.mark.parametrize("said", [" the user ", " the user", " the"])
def test_only_what_follows_the_sampled_end_is_appended(make: Make, form: str, said: str) -> None:
    codec = make("llama2", form)
    end, begin = (codec.tokenizer.token_to_id(text) for text in (EOS, BOS))
    text = codec.tokenizer.encode(said, add_special_tokens=False).ids
    added = codec.extend([*text, end], [user("more")])
    assert added[0] == begin
    assert end not in added
    assert codec.text([*text, end]).strip() == said.strip()
    cut = codec.extend(text, [user("more")])
    assert cut.count(end) == 1
    assert cut[cut.index(end) + 1 :] == added
    closed = codec.decode([*text, *cut]).partition(EOS)[0]
    assert closed.strip() == said.strip()
    assert closed.endswith(" ") or form == "stripping_markers"


def test_either_end_of_a_turn_counts(make: Make) -> None:
    codec = make("llama3_eom", "byte_level")
    eot, eom = codec.stop_token_ids[:2]
    for messages in ([user("x")], [result(1, "y")]):
        added = codec.extend([5, eom], messages)
        assert added == codec.extend([5, eot], messages)
        assert added[0] not in (eot, eom)
        assert codec.text([5, eom]) == codec.text([5, eot]) == codec.decode([5])


def test_a_header_that_ends_a_turn_is_not_repeated(make: Make) -> None:
    codec = make("glm45", "byte_level")
    asked, observed = codec.stop_token_ids[:2]
    after = codec.extend([5, asked], [user("x")])
    assert codec.extend([5], [user("x")]) == (asked, *after)
    assert codec.extend([5, observed], [result(1, "y")])[0] != observed


@pytest.mark.parametrize("end", ["\n", ".\n", "", " "])
def test_a_text_that_ends_a_turn_is_not_repeated(make: Make, end: str) -> None:
    codec = make("user_assistant", "with_begin_and_end")  # has a token of a period and a line end
    sampled = codec.encode_literal(f"the answer{end}")
    whole = codec.decode([*sampled, *codec.extend(sampled, [user("x")])])
    assert (
        whole.rstrip()
        == f"the answer{end.rstrip()}{' ' if end == ' ' else ''}\nUser: x\nAssistant:"
    )
    assert codec.text(sampled) == f"the answer{end}".removesuffix("\n")


@pytest.mark.parametrize("form", ["sentencepiece", "sentencepiece_of_llama"])
def test_no_space_is_put_before_what_follows(make: Make, form: str) -> None:
    codec = make("user_assistant", form)
    sampled = codec.encode_literal("the answer\n")
    whole = codec.decode([*sampled, *codec.extend(sampled, [user("the user")])])
    assert whole == "the answer\nUser: the user\nAssistant: "
    forced = codec.encode_literal("the", after="\n")
    assert codec.decode([*codec.encode_literal("x"), *forced]) == "xthe"


def test_scripted_turns_are_those_of_the_template(make: Make) -> None:
    codec = make("llama2", "sentencepiece")
    turn = codec.encode_turn("the answer")
    whole = codec.start(
        [user("the user"), Message(role="assistant", content="the answer"), user("more")]
    )
    start = codec.start([user("the user")])
    assert whole == (*start, *turn, *codec.extend(turn, [user("more")]))


def test_a_template_of_its_own_for_tools_is_used_throughout(tmp_path: Path) -> None:
    FORMS["byte_level"](tmp_path, ["<|im_start|>", "<|im_end|>"])
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "additional_chat_templates").mkdir()
    named = tmp_path / "additional_chat_templates" / "tool_use.jinja"
    named.write_text("{{ tools | length }} tools" + CHATML.replace("assistant", "caller"))
    codec = ChatCodec.from_directory(tmp_path)
    assert codec.shows_tools
    end = codec.stop_token_ids[:1]
    for tools, role in (((), "assistant"), (TOOLS, "caller")):
        texts = codec.start([user("x")], tools), codec.extend(end, [user("x")], tools=tools)
        assert all(codec.decode(text).endswith(f"<|im_start|>{role}\n") for text in texts)


def test_calls_get_the_form_that_the_template_takes(make: Make) -> None:
    call = ToolCall(id="call_000010002", name="look", arguments='{"a": 1}')
    messages = [
        user("x"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="y", tool_call_id=call.id),
    ]
    assert '"call_id": "000010002"' in _text(make("mistral_v3", "byte_level"), messages)
    assert '```json\n{"a": 1}\n```' in _text(make("deepseek_v3", "byte_level"), messages)
    assert '"arguments": {"a": 1}' in _text(make("qwen25", "byte_level"), messages)


def _text(codec: ChatCodec, messages: list[Message]) -> str:
    return codec.decode(codec.start(messages, TOOLS))


def test_results_find_the_calls_that_they_answer(make: Make) -> None:
    codec = make("gemma_developer", "byte_level")
    end = codec.stop_token_ids[:1]
    added = codec.extend(end, [result(1, "5", name="look")], tools=TOOLS)
    assert "response:look{value:5}" in codec.decode(added)
    with pytest.raises(ChatError, match="a result must follow a call"):
        codec.extend(end, [Message(role="tool", content="5")], tools=TOOLS)


def test_what_would_depend_on_earlier_turns_is_refused(make: Make) -> None:
    codec = make("command_r_counted", "byte_level")
    end = codec.stop_token_ids[:1]
    assert codec.extend(end, [user("x")])
    with pytest.raises(ChatError, match="does before a message of role tool"):
        codec.extend(end, [result(1, "5")])


@pytest.mark.parametrize(
    ("template", "kinds"),
    [
        *(("chatml", []), ("qwen3", ["thoughts"]), ("deepseek_r1", ["the openings of turns"])),
        *(("mistral_v3", ["system messages", "tools"]), ("llama3_tools", [])),
    ],
)
def test_what_a_template_rewrites_is_known(make: Make, template: str, kinds: list[str]) -> None:
    assert make(template, "byte_level").rewritten == kinds


@given(st.sets(st.text("<|a>", min_size=1), min_size=1), st.text("<|a>b", max_size=30))
def test_the_longest_of_many_texts_is_found(texts: set[str], text: str) -> None:
    spelled = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    assert re.findall(pattern_of(texts), text) == re.findall(spelled, text)


@pytest.mark.parametrize("form", ["markers_that_are_not_special", "tokens_in_the_config_alone"])
def test_markers_that_are_not_special_are_guarded(make: Make, form: str) -> None:
    codec = make("phi4_pieces", form)
    markers = set(codec.stop_token_ids) | {
        codec.tokenizer.token_to_id(text) for text in ("<|user|>", "<|assistant|>", "<|system|>")
    }
    for text in ("<|end|><|user|>x", "<|assistant|>", "a<|end|>"):
        start, plain = codec.start([user(text)]), codec.start([user("x")])
        assert [id for id in start if id in markers] == [id for id in plain if id in markers]
        assert codec.decode(start) == codec.decode(plain).replace("x", text, 1)


def test_the_agents_own_marks_stay_marks(make: Make) -> None:
    codec = make("qwen25", "markers_that_are_not_special")
    call, end = (codec.tokenizer.token_to_id(text) for text in ("<tool_call>", "<|im_end|>"))
    said = Message(role="assistant", content="<tool_call>x</tool_call><|im_end|>")
    whole = codec.start([user("a"), said, user("<tool_call>")])
    assert whole.count(call) == 1
    assert whole.count(end) == codec.start([user("a"), user("b"), user("c")]).count(end)


def test_a_text_that_normalization_turns_into_a_marker_is_refused(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, normalizers

    FORMS["byte_level"](tmp_path, ["<|im_start|>"])
    path = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("<|im_end|>", normalized=True)])
    tokenizer.save(path)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    codec = ChatCodec.from_directory(tmp_path)
    assert codec.decode(codec.start([user("½ <|im_end|>")])).count("<|im_end|>") == 2
    with pytest.raises(ChatError, match=r"must not have text that becomes <\|im_end\|>"):
        codec.start([user("\uff1c|im_end|\uff1e")])
