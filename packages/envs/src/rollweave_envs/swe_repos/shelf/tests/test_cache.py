import unittest

from shelf.cache import LRU, Expiring


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class LRUTest(unittest.TestCase):
    def test_keeps_as_many_as_asked(self):
        cache = LRU(2)
        for key in "abc":
            cache.put(key, key.upper())
        self.assertEqual(cache.keys(), ["b", "c"])
        self.assertEqual(cache.get("a"), None)

    def test_reading_is_using(self):
        cache = LRU(2)
        cache.put("a", 1)
        cache.put("b", 2)
        cache.get("a")
        cache.put("c", 3)
        self.assertEqual(cache.keys(), ["a", "c"])

    def test_writing_again_is_using(self):
        cache = LRU(2)
        cache.put("a", 1)
        cache.put("b", 2)
        cache.put("a", 9)
        cache.put("c", 3)
        self.assertEqual(cache.keys(), ["a", "c"])
        self.assertEqual(cache.get("a"), 9)

    def test_none_is_a_value(self):
        cache = LRU(2)
        cache.put("a", None)
        self.assertEqual(cache.get("a", "default"), None)
        self.assertEqual(cache.get("b", "default"), "default")

    def test_counts(self):
        cache = LRU(2)
        cache.put("a", 1)
        for key in "aabc":
            cache.get(key)
        self.assertEqual((cache.hits, cache.misses), (2, 2))

    def test_resize(self):
        cache = LRU(4)
        for key in "abcd":
            cache.put(key, 0)
        cache.get("a")
        cache.resize(2)
        self.assertEqual(cache.keys(), ["d", "a"])
        cache.put("e", 0)
        self.assertEqual(cache.keys(), ["a", "e"])

    def test_sizes_that_cannot_be(self):
        with self.assertRaises(ValueError):
            LRU(0)
        with self.assertRaises(ValueError):
            LRU(1).resize(0)


class ExpiringTest(unittest.TestCase):
    def test_until_its_time(self):
        clock = Clock()
        cache = Expiring(10, clock=clock)
        cache.put("a", 1)
        clock.now = 9.9
        self.assertEqual(cache.get("a"), 1)
        clock.now = 10.0
        self.assertEqual(cache.get("a", "gone"), "gone")

    def test_time_of_its_own(self):
        clock = Clock()
        cache = Expiring(10, clock=clock)
        cache.put("a", 1, seconds=100)
        cache.put("b", 1, seconds=0)
        self.assertEqual(cache.get("b", "gone"), "gone")
        clock.now = 50.0
        self.assertEqual(cache.get("a"), 1)

    def test_touch(self):
        clock = Clock()
        cache = Expiring(10, clock=clock)
        cache.put("a", 1)
        clock.now = 9.0
        cache.touch("a")
        clock.now = 18.0
        self.assertEqual(cache.get("a"), 1)
        clock.now = 30.0
        with self.assertRaises(KeyError):
            cache.touch("a")

    def test_sweep(self):
        clock = Clock()
        cache = Expiring(10, clock=clock)
        cache.put("a", 1)
        clock.now = 5.0
        cache.put("b", 2)
        clock.now = 10.0
        self.assertEqual(cache.sweep(), 1)
        self.assertEqual(len(cache), 1)


if __name__ == "__main__":
    unittest.main()
