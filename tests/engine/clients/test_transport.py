"""Server-sent events are the same however the stream is divided into parts."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rollweave.engine.clients.transport import DATA, EVENT_END, EventDecoder

pieces = st.sampled_from([DATA, b"data:", b"a", b"\n", EVENT_END, b": alive", b"\r\n"])


def whole(stream: bytes) -> list[bytes]:
    """Return the data of the complete events of a stream."""
    *events, _ = stream.split(EVENT_END)
    return [event.removeprefix(DATA) for event in events if event.startswith(DATA)]


@given(st.lists(pieces, max_size=12).map(b"".join), st.lists(st.integers(0, 60), max_size=8))
def test_events_are_the_same_however_a_stream_is_divided(stream: bytes, cuts: list[int]) -> None:
    decoder = EventDecoder()
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parts = [stream[start:end] for start, end in pairwise(bounds)]
    assert [event for part in parts for event in decoder.feed(part)] == whole(stream)
