"""Trains from stop to stop, at minutes of the day."""

from bisect import bisect_left

from routes.graph import NoWayError


def minutes(text):
    """Of "7:05". Raises ValueError for what is no time of the day; 24:00 is its end."""
    hours, colon, rest = text.partition(":")
    if not colon or not hours.isdigit() or not rest.isdigit() or len(rest) != 2:
        raise ValueError(f"not a time: {text!r}")
    found = int(hours) * 60 + int(rest)
    if int(rest) > 59 or found > 24 * 60:
        raise ValueError(f"not a time: {text!r}")
    return found


def clock(minute):
    """"07:05"; beyond a day with the number of days: "00:10+1"."""
    days, minute = divmod(minute, 24 * 60)
    text = f"{minute // 60:02d}:{minute % 60:02d}"
    return f"{text}+{days}" if days else text


class Timetable:
    """`change` is how many minutes it takes to change trains."""

    def __init__(self, *, change=3):
        self._change = change
        self._departures = {}

    def add(self, train, stops):
        """`stops` are (name, arrival, departure), in order; the first one's arrival and the last one's departure count not."""
        stops = list(stops)
        for (name, _, leaves), (target, arrives, _) in zip(stops, stops[1:]):
            if arrives <= leaves:
                raise ValueError(f"train {train} must arrive after it leaves, at {target}")
            rides = self._departures.setdefault(name, [])
            rides.append((leaves, arrives, target, train))
            rides.sort()

    def departures(self, stop, after, *, count=3):
        """The next ones as (minute, train, target), at or after a minute."""
        rides = self._departures.get(stop, [])
        place = bisect_left(rides, (after,))
        return [(leaves, train, target) for leaves, _, target, train in rides[place : place + count]]

    def arrival(self, source, target, start):
        """The earliest minute at `target`, leaving at `start` or later. Raises NoWayError."""
        best = {(source, ""): start}
        todo = [(start, source, "")]
        arrived = []
        while todo:
            todo.sort()
            now, stop, train = todo.pop(0)
            if stop == target:
                arrived.append(now)
                break
            for leaves, arrives, other, ride in self._departures.get(stop, []):
                earliest = now if train in ("", ride) else now + self._change
                if leaves >= earliest and arrives < best.get((other, ride), 10**9):
                    best[(other, ride)] = arrives
                    todo.append((arrives, other, ride))
        if not arrived:
            raise NoWayError(f"no train from {source} to {target} after {start}")
        return arrived[0]
