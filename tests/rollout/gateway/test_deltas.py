"""The text of a turn while it is sampled, however its tokens arrive: what is released
stands, whatever follows.
"""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.rollout.chat.replies import Hermes
from rollweave.rollout.gateway.deltas import (
    ContradictionError,
    DeltaReader,
    TextDelta,
    text_deltas,
)
from rollweave.rollout.gateway.responses import read_turn
from tests.support.chats import codec
from tests.support.properties import examples
from tests.support.scripted_gateway import CALL, CODEC, END, encode, engine_result

PARTS = ["one", "é🙂", CALL, "<tool_call>", "</tool_call>", " \n", "stop", "<|eot|>", "  two"]
words = st.sampled_from(PARTS).map(encode)
tokens = st.lists(words | st.lists(st.integers(0, 405), max_size=3).map(tuple), max_size=6).map(
    lambda parts: tuple(token for part in parts for token in part)
)
stops = st.lists(st.sampled_from(["stop", "ne", "🙂", "tool", "stone"]), max_size=2).map(tuple)


def logprobs_of(sampled: Sequence[int]) -> tuple[float, ...]:
    return engine_result(sampled).logprobs


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@settings(max_examples=examples(400))
@given(
    sampled=tokens,
    ended=st.booleans(),
    tools=st.booleans(),
    stop=stops,
    cut=st.booleans(),
    arrivals=st.lists(st.integers(1, 4), max_size=30),
    logprobs=st.booleans(),
)
def test_released_deltas_are_the_first_ones_of_the_complete_turn(
    sampled: tuple[int, ...],
    ended: bool,
    tools: bool,
    stop: tuple[str, ...],
    cut: bool,
    arrivals: list[int],
    logprobs: bool,
) -> None:
    sampled = (*sampled, END) if ended or not sampled else sampled
    stop_tokens = sampled[-1:] if cut else ()
    result = engine_result(sampled)
    hermes = Hermes() if tools else None
    message, length = read_turn(CODEC, hermes, result, number=0, stop=stop, stop_tokens=stop_tokens)
    reader = DeltaReader(
        CODEC,
        stop=stop,
        stop_tokens=stop_tokens,
        call_start=Hermes.call_start if tools else None,
        logprobs=logprobs,
    )
    released: list[TextDelta] = []
    arrived = 0
    for count in arrivals:
        arrived = min(arrived + count, len(sampled))
        released += reader.read(sampled[:arrived], result.logprobs[:arrived])
        assert message.content.startswith(text_of(released)), "what is released stands"
    complete = text_deltas(CODEC, result, length=length)
    rest = reader.finish(result, length)
    assert (*released, *rest) == complete


@settings(max_examples=examples(300))
@given(sampled=tokens.filter(len), other=tokens, same=st.integers(0, 30), seen=st.integers(1, 30))
def test_a_turn_that_begins_anew_goes_on_or_is_broken_off(
    sampled: tuple[int, ...], other: tuple[int, ...], same: int, seen: int
) -> None:
    """It goes on if and only if it begins with the tokens whose text was released."""
    anew = (*sampled[:same], *other, END)
    reader = DeltaReader(CODEC)
    released = reader.read(sampled[:seen], logprobs_of(sampled[:seen]))
    count = sum(1 for _ in _tokens_of(released, sampled))
    result = engine_result(anew)
    length = len(CODEC.text(anew))
    agrees = anew[:count] == sampled[:count]
    arriving = [anew[:1], anew[: len(anew) // 2], anew]
    try:
        for arrived in arriving:
            released += reader.read(arrived, result.logprobs[: len(arrived)])
        released += reader.finish(result, length)
    except ContradictionError:
        assert not agrees
    else:
        assert agrees
        assert text_of(released) == CODEC.text(anew)


def _tokens_of(released: Sequence[TextDelta], sampled: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens whose text was released."""
    text = text_of(released)
    ends = [end for end in range(len(sampled) + 1) if CODEC.decode(sampled[:end]) == text]
    return sampled[: ends[0]]


@pytest.mark.parametrize(
    ("change", "goes_on"), [(0.0, True), (1e-6, True), (1e-2, False), (float("nan"), False)]
)
def test_log_probs_that_were_sent_must_stand(change: float, goes_on: bool) -> None:
    """Another engine computes the same ones, but for rounding; other weights do not."""
    sampled = encode("one two")
    first = logprobs_of(sampled)
    anew = tuple(logprob + change for logprob in first)
    for wanted in (False, True):
        reader = DeltaReader(CODEC, logprobs=wanted)
        assert reader.read(sampled[:2], first[:2])
        if goes_on or not wanted:
            released = reader.read(sampled[:1], anew[:1]) + reader.read(sampled, anew)
            assert released, "log-probs are compared with the newest ones from then on"
            rest = (*sampled, END)
            result = msgspec.structs.replace(engine_result(rest), logprobs=(*anew, -1.0))
            assert reader.finish(result, len("one two")) == []
        else:
            with pytest.raises(ContradictionError, match="log-probs"):
                reader.read(sampled, anew)


def test_other_tokens_are_noticed_before_the_turn_ends() -> None:
    reader = DeltaReader(CODEC)
    sampled, other = encode("one two"), encode("six")
    assert reader.read(sampled, logprobs_of(sampled))
    with pytest.raises(ContradictionError, match="other tokens"):
        reader.read(other[:1], logprobs_of(other[:1]))


def test_all_of_the_end_of_a_turn_is_held_back() -> None:
    """Its first token ends the turn at an engine that heeds stop tokens."""
    chatml = codec("chatml")
    reader = DeltaReader(chatml)
    sampled = (*encode("so"), *chatml.encode_turn("")[:1], *encode("\n"))
    assert chatml.end_overlap(sampled) == 2
    assert text_of(reader.read(sampled, logprobs_of(sampled))) == "so"
