"""A turn in the client's view, for any tokens: the stream adds up to the complete
response, and both to the sampled text.
"""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.rollout.chat.replies import Hermes
from rollweave.rollout.gateway.completions import Chunks, completion
from rollweave.rollout.gateway.deltas import text_deltas
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.rollout.gateway.responses import ChatReply, ReplyHead, finish_reason, read_turn
from rollweave.schema.serving import FinishReason
from tests.support.properties import examples
from tests.support.scripted_gateway import CALL, CODEC, END, encode, engine_result

words = st.sampled_from(
    ["one", "é🙂", CALL, "<tool_call>", "</tool_call>", " \n", "stop", "<|eot|>"]
).map(encode)
tokens = st.lists(words | st.lists(st.integers(0, 405), max_size=3).map(tuple), max_size=6).map(
    lambda parts: tuple(token for part in parts for token in part)
)


def reply_of(
    sampled: tuple[int, ...],
    *,
    tools: bool,
    stop: tuple[str, ...],
    finish: FinishReason,
    stop_tokens: tuple[int, ...] = (),
) -> ChatReply:
    result = engine_result(sampled, finish=finish)
    hermes = Hermes() if tools else None
    message, deltas = read_turn(CODEC, hermes, result, number=7, stop=stop, stop_tokens=stop_tokens)
    return ChatReply(
        message=message,
        deltas=text_deltas(CODEC, result, length=deltas),
        finish_reason=finish_reason(message, finish),
        prompt_tokens=1,
        result=result,
    )


def put_together(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, assembled as clients do."""
    content, calls = "", dict[int, dict[str, str]]()
    for choice in (choice for chunk in stream for choice in chunk["choices"]):
        content += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls", ()):
            call = calls.setdefault(delta["index"], {"id": "", "name": "", "arguments": ""})
            call["id"] += delta.get("id", "")
            call["name"] += delta["function"].get("name", "")
            call["arguments"] += delta["function"]["arguments"]
    return {"content": content, "calls": [calls[index] for index in sorted(calls)]}


@settings(max_examples=examples(300))
@given(
    sampled=tokens,
    ended=st.booleans(),
    tools=st.booleans(),
    stop=st.lists(st.sampled_from(["stop", "ne", "🙂", "tool"]), max_size=2).map(tuple),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    cut=st.booleans(),
)
def test_a_stream_adds_up_to_the_complete_response(
    sampled: tuple[int, ...],
    ended: bool,
    tools: bool,
    stop: tuple[str, ...],
    finish: FinishReason,
    cut: bool,
) -> None:
    sampled = (*sampled, END) if ended or not sampled else sampled
    stop_tokens = sampled[-1:] if cut else ()
    reply = reply_of(sampled, tools=tools, stop=stop, finish=finish, stop_tokens=stop_tokens)
    ask = ChatRequest(model="m", messages=(), logprobs=True, include_usage=True)
    head = ReplyHead(id="r", created=0, model="m")
    stream = list(Chunks(CODEC, head, ask).rest(reply))
    body = json.loads(json.dumps(completion(CODEC, head, reply, ask)))
    assembled = put_together(json.loads(json.dumps(stream)))
    message = body["choices"][0]["message"]
    assert assembled["content"] == (message["content"] or "")
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    assert assembled["calls"] == calls
    # What is shown is what was assembled up to the stop text; with calls, less the
    # calls and the space around.
    text = CODEC.text(sampled)
    if cut:
        text = text[: len(CODEC.decode(sampled[:-1]))]
    for each in stop:
        text = text.partition(each)[0] if each in text else text
    if not calls:
        assert message["content"] == text
    assert "".join(piece.text for piece in reply.deltas) == text
    entries = body["choices"][0]["logprobs"]["content"]
    streamed = [
        choice["logprobs"] for chunk in stream for choice in chunk["choices"] if choice["logprobs"]
    ]
    assert [entry for part in streamed for entry in part["content"]] == entries
    assert [entry["logprob"] for entry in entries] == [
        -0.5 - place for place in range(len(entries))
    ]
    # The end of every piece is the end of a character.
    for end in range(1, len(reply.deltas)):
        shown_text = "".join(piece.text for piece in reply.deltas[:end])
        count = sum(len(piece.entries) for piece in reply.deltas[:end])
        assert CODEC.decode(sampled[:count]) == shown_text
    assert stream[-1]["usage"] == body["usage"]
