"""The process that compiles grammars and computes masks: what is too expensive is
refused, and everything else goes on.
"""

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollweave.engine import constraints
from rollweave.engine.constraints import FIRST_S, Matcher
from rollweave.engine.matchers import CANNOT, BusyError, GrammarCheck, MaskReply, Matchers
from rollweave.schema.serving import Constraint

SLOW = "a?" * 16_000
"""A pattern that takes five seconds of CPU time and a gigabyte."""


def regex(text: str) -> Constraint:
    return Constraint(kind="regex", text=text)


class Replies:
    """The replies of some texts, over bytes, in the order in which they come."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[tuple[str, MaskReply]] = queue.SimpleQueue()
        self.matchers = Matchers(None, reply=lambda *reply: self._arrived.put(reply), begin_s=0.3)

    def next(self) -> tuple[str, MaskReply]:
        return self._arrived.get(timeout=60)

    def begin(self, id: str, text: str, *tokens: int) -> MaskReply:
        self.matchers.begin(id, regex(text), tokens=tokens)
        name, reply = self.next()
        assert name == id
        return reply

    def feed(self, id: str, token: int) -> MaskReply:
        self.matchers.feed(id, token)
        name, reply = self.next()
        assert name == id
        return reply


@pytest.fixture
def replies() -> Iterator[Replies]:
    replies = Replies()
    yield replies
    replies.matchers.close()


def allowed(reply: MaskReply) -> str:
    """Return the printable characters that may follow."""
    assert not reply.error
    return "".join(chr(at) for at in range(32, 127) if reply.mask[at // 8] >> at % 8 & 1)


def test_a_text_goes_on_although_another_one_ends_the_worker(replies: Replies) -> None:
    assert allowed(replies.begin("a", "[ab]{2}x")) == "ab"
    assert replies.begin("slow", SLOW).error == f"{CANNOT}it takes too much CPU time"
    started = time.monotonic()
    assert replies.begin("again", SLOW).error == f"{CANNOT}it takes too much CPU time"
    assert time.monotonic() - started < 1.0, "a refusal is remembered"
    assert allowed(replies.feed("a", ord("b"))) == "ab"
    assert replies.begin("b", "ab", ord("a")).mask
    replies.matchers.end("a")
    assert allowed(replies.begin("a", "c")) == "c"  # the id may be used again
    assert replies.feed("a", ord("c")).complete
    assert "cannot be met" in replies.begin("c", "ab", ord("b")).error


def test_a_process_that_is_gone_is_replaced(replies: Replies) -> None:
    assert allowed(replies.begin("a", "[ab]{2}x")) == "ab"
    process = replies.matchers._process
    assert process is not None
    os.killpg(process._process.pid, signal.SIGKILL)
    process._process.wait()
    assert allowed(replies.feed("a", ord("a"))) == "ab"
    assert allowed(replies.feed("a", ord("a"))) == "x"


def test_closing_does_not_wait_for_a_grammar() -> None:
    replies = Replies()
    replies.begin("a", "a")
    replies.matchers.begin("slow", regex(SLOW))
    closer = threading.Thread(target=replies.matchers.close)
    closer.start()
    closer.join(20)
    assert not closer.is_alive()


def test_masks_of_one_text_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex("a*"))
    text = Matcher(matcher, vocab=tokenizer.vocab_size, ends=[], unused=tokenizer.vocab_size)
    text.allowed()
    monkeypatch.setattr(text, "_spent_s", 2 * FIRST_S)
    with pytest.raises(ValueError, match=r"its masks must take at most 5\.0 s of CPU time"):
        text.allowed()


def test_a_crash_says_that_memory_may_be_the_reason() -> None:
    assert constraints._why(signal.SIGABRT) == (
        f"{CANNOT}it takes too much memory (signal SIGABRT)"
    )


async def test_a_check_is_refused_when_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollweave.engine.matchers.MOST_CHECKS", 0)
    check = GrammarCheck()
    with pytest.raises(BusyError, match="grammars that wait to be compiled must be at most 0"):
        await check.why_not(regex("a"))
    monkeypatch.undo()
    assert await check.why_not(regex("a")) == ""
    assert "look-around" in await check.why_not(regex("a(?=b)"))
    assert await check.why_not(regex("x" * 40_000)) == (
        "it must have at most 32768 characters, got 40000"
    )
    check.close()


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    arrived: queue.SimpleQueue[MaskReply] = queue.SimpleQueue()
    matchers = Matchers(tmp_path, vocab=9, reply=lambda _, reply: arrived.put(reply))
    matchers.begin("a", regex("a"))
    assert "sampling.constraint needs a tokenizer, and" in arrived.get(timeout=60).error
    matchers.close()
