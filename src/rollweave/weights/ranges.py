"""Which bytes of a payload are there: disjoint half-open ranges, in order. Pure."""

import bisect
from collections.abc import Iterator


class Ranges:
    """A set of byte positions. Neighbouring ranges are one."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def add(self, start: int, stop: int) -> None:
        """Bytes `[start, stop)` are there."""
        if start >= stop:
            return
        low, high = bisect.bisect_left(self._stops, start), bisect.bisect_right(self._starts, stop)
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high], self._stops[low:high] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """Bytes `[start, stop)` are not there any more."""
        if start >= stop:
            return
        low, high = bisect.bisect_right(self._stops, start), bisect.bisect_left(self._starts, stop)
        held = zip(self._starts[low:high], self._stops[low:high], strict=True)
        kept = [
            (a, b)
            for first, last in held
            for a, b in ((first, min(last, start)), (max(first, stop), last))
            if a < b
        ]
        self._starts[low:high], self._stops[low:high] = [a for a, _ in kept], [b for _, b in kept]

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What of `[start, stop)` is not there."""
        gaps, at = [], start
        for number in range(bisect.bisect_right(self._stops, start), len(self._starts)):
            low, high = self._starts[number], self._stops[number]
            if low >= stop:
                break
            if low > at:
                gaps.append((at, low))
            at = high
        if at < stop:
            gaps.append((at, stop))
        return gaps

    def touches(self, start: int, stop: int) -> bool:
        """Whether any of `[start, stop)` is there."""
        return start < stop and self.missing(start, stop) != [(start, stop)]
