import asyncio
import unittest

from flow.events import Bus, matches


class BusTest(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        self.bus = Bus()
        self.heard = []

    def hear(self, name):
        return lambda topic, value: self.heard.append((name, topic, value))

    async def test_topics(self):
        self.bus.on("a", self.hear("x"))
        self.assertEqual([await self.bus.emit("a", 1), await self.bus.emit("b", 2)], [1, 0])
        self.assertEqual(self.heard, [("x", "a", 1)])

    async def test_asynchronous_listeners_are_waited_for(self):
        async def slow(topic, value):
            await asyncio.sleep(0)
            self.heard.append(value)

        self.bus.on("a", slow)
        await self.bus.emit("a", 1)
        self.assertEqual(self.heard, [1])

    async def test_order(self):
        self.bus.on("a", self.hear("low"), priority=-1)
        self.bus.on("a", self.hear("first"))
        self.bus.on("a", self.hear("second"))
        self.bus.on("a", self.hear("high"), priority=5)
        await self.bus.emit("a")
        self.assertEqual([name for name, _, _ in self.heard], ["high", "first", "second", "low"])

    async def test_once(self):
        self.bus.on("a", self.hear("x"), once=True)
        await self.bus.emit("b")
        await self.bus.emit("a", 1)
        await self.bus.emit("a", 2)
        self.assertEqual(self.heard, [("x", "a", 1)])

    async def test_off(self):
        off = self.bus.on("a", self.hear("x"))
        off()
        off()
        self.assertEqual(await self.bus.emit("a"), 0)

    async def test_off_while_others_hear(self):
        offs = []
        self.bus.on("a", lambda topic, value: offs[0](), priority=1)
        offs.append(self.bus.on("a", self.hear("x")))
        self.bus.on("a", self.hear("y"))
        await self.bus.emit("a")
        self.assertEqual([name for name, _, _ in self.heard], ["y"])

    async def test_failures_stop_nobody(self):
        def fail(topic, value):
            raise OSError("no")

        async def fail_later(topic, value):
            await asyncio.sleep(0)
            raise KeyError("no")

        self.bus.on("a", fail)
        self.bus.on("a", fail_later)
        self.bus.on("a", self.hear("x"))
        self.assertEqual(await self.bus.emit("a"), 3)
        self.assertEqual(self.heard, [("x", "a", None)])
        self.assertEqual([(topic, type(error).__name__) for topic, error in self.bus.failures], [("a", "OSError"), ("a", "KeyError")])

    async def test_wait(self):
        waiting = asyncio.ensure_future(self.bus.wait("a.*"))
        await asyncio.sleep(0)
        await self.bus.emit("b", 1)
        await self.bus.emit("a.b", 2)
        await self.bus.emit("a.c", 3)
        self.assertEqual(await waiting, ("a.b", 2))
        self.assertEqual(await self.bus.emit("a.d"), 0)


class MatchTest(unittest.TestCase):
    def test_patterns(self):
        self.assertEqual([matches("*", "a"), matches("a", "a"), matches("a", "a.b"), matches("a.*", "a.b.c")], [True, True, False, True])

    def test_names_that_begin_alike(self):
        self.assertEqual([matches("a.*", "ab"), matches("a.*", "a")], [False, False])


if __name__ == "__main__":
    unittest.main()
