"""Half-open intervals (start, end): the end does not belong to them."""


def merge(intervals):
    """Without overlaps, sorted; those that touch become one. Empty ones are left out."""
    found = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def free(busy, start, end, *, least=1):
    """Gaps between `start` and `end` that are at least `least` long."""
    gaps = []
    place = start
    for first, last in merge(busy):
        if first - place >= least and place < end:
            gaps.append((place, min(first, end)))
        place = max(place, last)
    if end - place >= least:
        gaps.append((place, end))
    return [(a, b) for a, b in gaps if b - a >= least]


def overlap(one, other):
    """Length of what two intervals have in common."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def most_at_once(intervals):
    """How many there are at the busiest moment."""
    changes = []
    for start, end in intervals:
        if start < end:
            changes.append((start, 1))
            changes.append((end, -1))
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def most_without_overlap(intervals):
    """A largest selection of intervals that do not overlap, by their ends."""
    found = []
    for start, end in sorted(intervals, key=lambda interval: (interval[1], interval[0])):
        if not found or start >= found[-1][1]:
            found.append((start, end))
    return found
