import itertools
import unittest

from flow.retry import Breaker, GaveUpError, delays, retry


class Flaky:
    """Fails as often as asked, then returns how often it was called."""

    def __init__(self, failures, error=OSError):
        self.failures, self.error, self.called = failures, error, 0

    async def __call__(self):
        self.called += 1
        if self.called <= self.failures:
            raise self.error(f"failure {self.called}")
        return self.called


class RetryTest(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        self.slept = []

    async def sleep(self, seconds):
        self.slept.append(seconds)

    async def test_at_once(self):
        self.assertEqual(await retry(Flaky(0), sleep=self.sleep), 1)
        self.assertEqual(self.slept, [])

    async def test_later_and_later(self):
        self.assertEqual(await retry(Flaky(3), sleep=self.sleep), 4)
        self.assertEqual(self.slept, [1.0, 2.0, 4.0])

    async def test_gives_up(self):
        call = Flaky(9)
        with self.assertRaises(GaveUpError):
            await retry(call, attempts=3, sleep=self.sleep)
        self.assertEqual((call.called, self.slept), (3, [1.0, 2.0]))

    async def test_the_last_chance_counts(self):
        self.assertEqual(await retry(Flaky(2), attempts=3, sleep=self.sleep), 3)

    async def test_says_how_often(self):
        told = 0
        try:
            await retry(Flaky(9), attempts=4, sleep=self.sleep)
        except GaveUpError as error:
            told = (error.attempts, str(error.__cause__))
        self.assertEqual(told, (4, "failure 4"))

    async def test_other_failures_at_once(self):
        call = Flaky(9, KeyError)
        with self.assertRaises(KeyError):
            await retry(call, on=(OSError,), sleep=self.sleep)
        self.assertEqual(call.called, 1)

    async def test_no_attempts(self):
        with self.assertRaises(ValueError):
            await retry(Flaky(0), attempts=0)


class DelaysTest(unittest.TestCase):
    def test_longest(self):
        self.assertEqual(list(itertools.islice(delays(10, 3, 100), 4)), [10, 30, 90, 100])


class BreakerTest(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        self.now = 0.0
        self.breaker = Breaker(2, 10, clock=lambda: self.now)

    async def fail(self):
        raise OSError("no")

    async def work(self):
        return "done"

    async def outcome(self, function):
        try:
            return await self.breaker.call(function)
        except Exception as error:
            return type(error).__name__

    async def test_opens(self):
        said = [await self.outcome(function) for function in (self.fail, self.fail, self.work)]
        self.assertEqual(said, ["OSError", "OSError", "ConnectionError"])

    async def test_in_a_row(self):
        said = [await self.outcome(function) for function in (self.fail, self.work, self.fail, self.work)]
        self.assertEqual(said, ["OSError", "done", "OSError", "done"])

    async def test_rests(self):
        await self.outcome(self.fail)
        await self.outcome(self.fail)
        self.now = 9.9
        self.assertEqual(await self.outcome(self.work), "ConnectionError")
        self.now = 10.0
        self.assertEqual(await self.outcome(self.work), "done")
        self.assertEqual(await self.outcome(self.fail), "OSError")
        self.assertEqual(self.breaker.open, False)

    async def test_one_is_tried(self):
        await self.outcome(self.fail)
        await self.outcome(self.fail)
        self.now = 10.0
        self.assertEqual(await self.outcome(self.fail), "OSError")
        self.assertEqual(await self.outcome(self.work), "ConnectionError")


if __name__ == "__main__":
    unittest.main()
