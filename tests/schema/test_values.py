"""What follows from values: versions of tokens, errors in words, copies."""

import itertools
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rollweave.schema import serving as s
from rollweave.schema.base import DEPTH, copied, is_deep, mix, packed
from rollweave.schema.errors import CorruptJournalError, FieldError, FieldErrors
from rollweave.schema.roles import WorkerError, WorkerFailure
from rollweave.schema.work import Ignored

PLACE = st.integers(0, 9)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1)), max_size=5), PLACE, PLACE)
def test_spans_name_a_version_for_each_token(
    lengths: list[tuple[int, int]], start: int, end: int
) -> None:
    spans, versions = list[s.VersionSpan](), list[int]()
    for length, version in lengths:
        first = len(versions)
        versions += [version] * length
        spans.append(s.VersionSpan(start=first, end=first + length, version=version))
    assert s.spans_cover(spans, len(versions))
    assert s.spans_cover(spans[1:], len(versions), start=spans[0].end if spans else 0)
    assert not s.spans_cover(spans, len(versions) + 1)
    assert s.spans_cover(spans[1:], len(versions)) is (not spans)
    empty = s.VersionSpan(start=len(versions), end=len(versions), version=0)
    assert not s.spans_cover([*spans, empty], len(versions))
    parts = s.spans_between(spans, start, end)
    named = [(token, part.version) for part in parts for token in range(part.start, part.end)]
    assert named == [*enumerate(versions)][start:end]
    assert all(one.version != two.version for one, two in itertools.pairwise(parts))
    apart = (s.VersionSpan(start=0, end=1, version=1), s.VersionSpan(start=2, end=3, version=1))
    assert s.spans_between(apart, 0, 3) == apart


def test_errors_are_told_in_words() -> None:
    error = FieldError("a.b", "be 1", 2)
    assert (str(error), str(error.of("c"))) == ("a.b must be 1, got 2", "c must be 1, got 2")
    assert str(FieldErrors([error, FieldError("d", "be 3")])) == "a.b must be 1, got 2\nd must be 3"
    assert error.args == ("a.b", "be 1", 2)
    assert FieldErrors([error]).args == ([error],)
    assert str(CorruptJournalError("x is torn", "restore it")) == "x is torn; restore it"
    assert str(CorruptJournalError("x is torn")) == CorruptJournalError("x is torn").problem
    failure = WorkerFailure(rank=1, kinds=("KeyError", "Error"), text="k", place="a.py:3")
    assert str(WorkerError("m.f", [failure])) == "m.f rank 1: KeyError: k (a.py:3)"
    pair = WorkerError("m.f", [msgspec.structs.replace(failure, place=""), failure])
    assert (str(pair), pair.failures[1]) == ("m.f rank 1: KeyError: k; and 1 more", failure)
    ignored = Ignored(field="n", value="2", requests=2)
    assert str(ignored) == "n = 2: ignored, in 2 requests"
    assert str(msgspec.structs.replace(ignored, requests=1)).endswith("in 1 request")


def test_copies_seeds_and_depths() -> None:
    copy = copied(value := {"a": [{"b": [1]}]})
    assert copy == value
    copy["a"][0]["b"].append(2)
    assert value == {"a": [{"b": [1]}]}
    assert (mix(1, "a"), mix()) == (4574243854444617091, 1622210670741801569)
    deep: Any = 1
    for depth in range(DEPTH):
        deep = [deep] if depth % 2 else {"a": 1, "b": deep}
    assert [is_deep(value) for value in ("text", deep, [1, deep], {"a": deep, "b": 1})] == [
        *(False, False, True, True)
    ]
    most = [1 << 64, (1 << 64) - 1, -(1 << 63) - 1, True]
    assert msgspec.msgpack.decode(packed(most)) == [most[1], most[1], -(1 << 63), True]
    finishes = [finish for finish in s.FinishReason if s.openai_finish_reason(finish) == "stop"]
    assert finishes == [s.FinishReason.STOP]
