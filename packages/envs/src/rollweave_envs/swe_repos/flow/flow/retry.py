"""Try again, later and later."""

import asyncio


class GaveUpError(Exception):
    """All attempts failed. `attempts` is how many there were; the last failure is the cause."""

    def __init__(self, attempts):
        super().__init__(f"gave up after {attempts} attempts")
        self.attempts = attempts


def delays(first=1.0, factor=2.0, longest=60.0):
    """Seconds between attempts, without end."""
    delay = first
    while True:
        yield min(delay, longest)
        delay *= factor


async def retry(call, *, attempts=5, on=(Exception,), first=1.0, longest=60.0, sleep=asyncio.sleep):
    """What `await call()` returns. Failures of the kinds `on` are tried again, others are raised at once."""
    if attempts < 1:
        raise ValueError(f"attempts must be at least 1, got {attempts}")
    waits = delays(first, longest=longest)
    for number in range(1, attempts + 1):
        try:
            return await call()
        except on as error:
            if number == attempts:
                raise GaveUpError(attempts) from error
            await sleep(next(waits))


class Breaker:
    """Refuses calls for `rest` seconds after `most` failures in a row; then one is tried."""

    def __init__(self, most, rest, *, clock):
        self._most, self._rest, self._clock = most, rest, clock
        self._failures = 0
        self._until = None

    @property
    def open(self):
        return self._until is not None and self._clock() < self._until

    async def call(self, function, *args):
        """Raises ConnectionError while it is open."""
        if self.open:
            raise ConnectionError("the circuit is open")
        try:
            result = await function(*args)
        except Exception:
            self._failures += 1
            if self._failures >= self._most:
                self._until = self._clock() + self._rest
            raise
        self._failures = 0
        self._until = None
        return result
