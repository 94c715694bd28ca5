"""Many calls, a few at a time."""

import asyncio


async def gather(calls, *, limit):
    """What the functions return when awaited, in their order, at most `limit` at once. The first failure is raised."""
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    gate = asyncio.Semaphore(limit)

    async def one(call):
        async with gate:
            return await call()

    tasks = [asyncio.ensure_future(one(call)) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def race(calls):
    """What the first to succeed returns; the others are cancelled. Where all fail, the last failure is raised."""
    tasks = [asyncio.ensure_future(call()) for call in calls]
    if not tasks:
        raise ValueError("nothing to race")
    try:
        failure = None
        for next_done in asyncio.as_completed(tasks):
            try:
                return await next_done
            except Exception as error:
                failure = error
        raise failure
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Once:
    """Calls for the same key at the same time are made once, and all get the result. Nothing is kept afterwards."""

    def __init__(self):
        self._running = {}

    async def do(self, key, call):
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.ensure_future(call())
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(task)


class Batcher:
    """Collects items, and hands them on together when there are `size` of them or somebody flushes."""

    def __init__(self, handle, size):
        self._handle, self._size = handle, size
        self._items = []
        self._turn = asyncio.Lock()

    async def add(self, item):
        self._items.append(item)
        if len(self._items) >= self._size:
            await self.flush()

    async def flush(self):
        """Hand on what there is, if anything. In order, one batch at a time. What fails is kept, for the next time."""
        async with self._turn:
            items, self._items = self._items, []
            if items:
                try:
                    await self._handle(items)
                except BaseException:
                    self._items = items + self._items
                    raise
