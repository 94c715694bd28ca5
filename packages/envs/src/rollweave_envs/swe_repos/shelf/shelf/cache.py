"""Bounded caches. Time is an argument: `clock` returns seconds."""

import time
from collections import OrderedDict

MISSING = object()


class LRU:
    """Keeps the `size` entries that were used last."""

    def __init__(self, size):
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self._size = size
        self._entries = OrderedDict()
        self.hits = 0
        self.misses = 0

    def get(self, key, default=None):
        value = self._entries.get(key, MISSING)
        if value is MISSING:
            self.misses += 1
            return default
        self.hits += 1
        self._entries.move_to_end(key)
        return value

    def put(self, key, value):
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def resize(self, size):
        """Fewer entries: the ones used last stay."""
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self._size = size
        while len(self._entries) > size:
            self._entries.popitem(last=False)

    def keys(self):
        """From the one used longest ago to the one used last."""
        return list(self._entries)

    def __len__(self):
        return len(self._entries)


class Expiring:
    """Keeps entries for `seconds`; an entry is gone when exactly that much time has passed."""

    def __init__(self, seconds, *, clock=time.monotonic):
        self._seconds, self._clock = seconds, clock
        self._entries = {}

    def put(self, key, value, *, seconds=None):
        """`seconds` otherwise than usual; 0 removes the entry."""
        lasts = self._seconds if seconds is None else seconds
        self._entries[key] = (self._clock() + lasts, value)

    def get(self, key, default=None):
        found = self._entries.get(key)
        if found is None:
            return default
        ends, value = found
        if self._clock() >= ends:
            del self._entries[key]
            return default
        return value

    def touch(self, key):
        """Let an entry last as long as a new one. Raises KeyError where it is gone."""
        value = self.get(key, MISSING)
        if value is MISSING:
            raise KeyError(key)
        self._entries[key] = (self._clock() + self._seconds, value)

    def sweep(self):
        """Remove what has expired; how many that were."""
        now = self._clock()
        gone = [key for key, (ends, _) in self._entries.items() if now >= ends]
        for key in gone:
            del self._entries[key]
        return len(gone)

    def __len__(self):
        return len(self._entries)
