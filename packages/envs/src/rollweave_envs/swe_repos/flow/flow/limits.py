"""How much, how fast."""


class Bucket:
    """A token bucket: `rate` a second, at most `size` at once. It is full at first."""

    def __init__(self, rate, size, *, clock):
        self._rate, self._size, self._clock = rate, size, clock
        self._level = size
        self._seen = clock()

    def take(self, count=1):
        """Whether there were enough; then they are gone. Raises ValueError for more than it can ever hold."""
        if count > self._size:
            raise ValueError(f"count must be at most {self._size}, got {count}")
        self._fill()
        if self._level < count:
            return False
        self._level -= count
        return True

    def wait_for(self, count=1):
        """Seconds until there are enough."""
        self._fill()
        return max(0.0, (count - self._level) / self._rate)

    def _fill(self):
        now = self._clock()
        self._level = min(self._size, self._level + (now - self._seen) * self._rate)
        self._seen = now


class Window:
    """At most `most` events of a key in any `seconds`."""

    def __init__(self, most, seconds, *, clock):
        self._most, self._seconds, self._clock = most, seconds, clock
        self._times = {}

    def allow(self, key):
        """Whether there may be one now; then it counts."""
        now = self._clock()
        times = [time for time in self._times.get(key, ()) if now - time < self._seconds]
        allowed = len(times) < self._most
        if allowed:
            times.append(now)
        self._times[key] = times
        return allowed

    def left(self, key):
        """How many more there may be now."""
        now = self._clock()
        return self._most - sum(1 for time in self._times.get(key, ()) if now - time < self._seconds)


class Debounce:
    """Whether a value has stayed the same for `seconds`."""

    def __init__(self, seconds, *, clock):
        self._seconds, self._clock = seconds, clock
        self._value = None
        self._since = None

    def see(self, value):
        now = self._clock()
        if self._since is None or value != self._value:
            self._value, self._since = value, now
        return now - self._since >= self._seconds
