"""Topics and those who listen to them."""

import asyncio


class Bus:
    """Listeners are functions, asynchronous or not. A pattern `a.*` hears all topics that begin with `a.`; `*` hears all."""

    def __init__(self):
        self._listeners = []
        self.failures = []

    def on(self, pattern, listener, *, once=False, priority=0):
        """Those of higher priority hear first, of equal ones those that came first. Returns a function that ends it."""
        entry = (pattern, listener, once, priority)
        self._listeners.append(entry)
        self._listeners.sort(key=lambda item: -item[3])

        def off():
            if entry in self._listeners:
                self._listeners.remove(entry)

        return off

    async def emit(self, topic, value=None):
        """Tell all listeners, one after the other; how many heard. One that fails is noted in `failures`."""
        heard = 0
        for entry in list(self._listeners):
            pattern, listener, once, _ = entry
            if not matches(pattern, topic):
                continue
            if entry not in self._listeners:
                continue
            if once:
                self._listeners.remove(entry)
            try:
                result = listener(topic, value)
                if asyncio.iscoroutine(result):
                    await result
            except Exception as error:
                self.failures.append((topic, error))
            heard += 1
        return heard

    async def wait(self, pattern):
        """The next (topic, value)."""
        future = asyncio.get_running_loop().create_future()
        off = self.on(pattern, lambda topic, value: future.done() or future.set_result((topic, value)))
        try:
            return await future
        finally:
            off()


def matches(pattern, topic):
    if pattern == "*":
        return True
    if pattern.endswith(".*"):
        return topic.startswith(pattern[:-1])
    return topic == pattern
