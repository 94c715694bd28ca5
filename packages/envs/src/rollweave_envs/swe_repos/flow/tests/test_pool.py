import asyncio
import unittest

from flow.pool import Batcher, Once, gather, race


class GatherTest(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        self.running = self.most = 0
        self.log = []

    def job(self, number, *, steps=3, fails=False):
        async def run():
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                for _ in range(steps):
                    await asyncio.sleep(0)
                if fails:
                    raise OSError(number)
                self.log.append(number)
                return number
            finally:
                self.running -= 1

        return run

    async def test_in_order(self):
        calls = [self.job(number, steps=9 - number) for number in range(5)]
        self.assertEqual(await gather(calls, limit=5), [0, 1, 2, 3, 4])

    async def test_limit(self):
        await gather([self.job(number) for number in range(9)], limit=3)
        self.assertEqual(self.most, 3)

    async def test_failure_ends_the_others(self):
        calls = [self.job(0, steps=1), self.job(1, steps=5, fails=True), self.job(2, steps=500)]
        with self.assertRaises(OSError):
            await gather(calls, limit=3)
        self.assertEqual((self.log, self.running), ([0], 0))

    async def test_nothing(self):
        self.assertEqual(await gather([], limit=1), [])

    async def test_no_limit(self):
        with self.assertRaises(ValueError):
            await gather([], limit=0)

    async def test_race(self):
        result = await race([self.job(0, steps=50), self.job(1, steps=2), self.job(2, steps=50)])
        self.assertEqual((result, self.running), (1, 0))

    async def test_race_goes_on_after_a_failure(self):
        result = await race([self.job(0, steps=1, fails=True), self.job(1, steps=9)])
        self.assertEqual(result, 1)

    async def test_race_that_all_lose(self):
        with self.assertRaises(OSError):
            await race([self.job(0, fails=True), self.job(1, fails=True)])

    async def test_race_of_none(self):
        with self.assertRaises(ValueError):
            await race([])


class OnceTest(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        self.called = []

    def work(self, key):
        async def run():
            self.called.append(key)
            for _ in range(3):
                await asyncio.sleep(0)
            return key.upper()

        return run

    async def test_at_the_same_time(self):
        once = Once()
        found = await asyncio.gather(*(once.do(key, self.work(key)) for key in "aab"))
        self.assertEqual((found, self.called), (["A", "A", "B"], ["a", "b"]))

    async def test_later_ones_again(self):
        once = Once()
        await once.do("a", self.work("a"))
        await asyncio.sleep(0)
        await once.do("a", self.work("a"))
        self.assertEqual(self.called, ["a", "a"])

    async def test_one_that_leaves_does_not_end_it_for_others(self):
        once = Once()
        first = asyncio.ensure_future(once.do("a", self.work("a")))
        second = asyncio.ensure_future(once.do("a", self.work("a")))
        await asyncio.sleep(0)
        first.cancel()
        self.assertEqual(await second, "A")


class BatcherTest(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        self.batches = []
        self.fails = 0

    async def handle(self, items):
        got = list(items)
        for _ in range(2):
            await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            raise OSError("no")
        self.batches.append(got)

    async def test_full_batches(self):
        batcher = Batcher(self.handle, 2)
        for item in range(5):
            await batcher.add(item)
        self.assertEqual(self.batches, [[0, 1], [2, 3]])
        await batcher.flush()
        self.assertEqual(self.batches, [[0, 1], [2, 3], [4]])

    async def test_nothing_to_flush(self):
        await Batcher(self.handle, 2).flush()
        self.assertEqual(self.batches, [])

    async def test_what_fails_is_kept(self):
        batcher = Batcher(self.handle, 2)
        self.fails = 1
        await batcher.add(0)
        with self.assertRaises(OSError):
            await batcher.add(1)
        await batcher.add(2)
        self.assertEqual(self.batches, [[0, 1, 2]])

    async def test_at_the_same_time(self):
        batcher = Batcher(self.handle, 2)
        await asyncio.gather(*(batcher.add(item) for item in range(6)))
        await batcher.flush()
        self.assertEqual(sorted(item for batch in self.batches for item in batch), [0, 1, 2, 3, 4, 5])


if __name__ == "__main__":
    unittest.main()
