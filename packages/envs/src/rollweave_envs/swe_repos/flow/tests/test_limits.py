import unittest

from flow.limits import Bucket, Debounce, Window


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class BucketTest(unittest.TestCase):
    def setUp(self):
        self.clock = Clock()
        self.bucket = Bucket(2.0, 4, clock=self.clock)

    def test_full_at_first(self):
        self.assertEqual([self.bucket.take() for _ in range(5)], [True, True, True, True, False])

    def test_fills(self):
        self.bucket.take(4)
        self.clock.now = 1.0
        self.assertEqual([self.bucket.take(2), self.bucket.take(1)], [True, False])

    def test_holds_no_more_than_its_size(self):
        self.bucket.take(4)
        self.clock.now = 100.0
        self.assertEqual([self.bucket.take(4), self.bucket.take(1)], [True, False])

    def test_what_fails_costs_nothing(self):
        self.bucket.take(3)
        self.assertEqual([self.bucket.take(2), self.bucket.take(1)], [False, True])

    def test_small_steps(self):
        self.bucket.take(4)
        for step in range(1, 9):
            self.clock.now = step / 8
            self.bucket.take(4)
        self.assertEqual(self.bucket.take(2), True)

    def test_fractions(self):
        self.bucket.take(4)
        self.clock.now = 0.5
        self.assertEqual([self.bucket.take(1), self.bucket.take(1)], [True, False])

    def test_too_many(self):
        with self.assertRaises(ValueError):
            self.bucket.take(5)

    def test_wait_for(self):
        self.bucket.take(4)
        self.assertEqual(self.bucket.wait_for(3), 1.5)
        self.clock.now = 1.0
        self.assertEqual([self.bucket.wait_for(3), self.bucket.wait_for(1)], [0.5, 0.0])


class WindowTest(unittest.TestCase):
    def setUp(self):
        self.clock = Clock()
        self.window = Window(2, 10, clock=self.clock)

    def test_most(self):
        self.assertEqual([self.window.allow("a") for _ in range(3)], [True, True, False])

    def test_keys(self):
        self.assertEqual([self.window.allow(key) for key in "abaab"], [True, True, True, False, True])

    def test_slides(self):
        self.window.allow("a")
        self.clock.now = 6.0
        self.window.allow("a")
        self.clock.now = 9.9
        self.assertEqual(self.window.allow("a"), False)
        self.clock.now = 10.0
        self.assertEqual([self.window.allow("a"), self.window.allow("a")], [True, False])

    def test_refused_ones_do_not_count(self):
        for _ in range(5):
            self.window.allow("a")
        self.clock.now = 10.0
        self.assertEqual(self.window.left("a"), 2)

    def test_left(self):
        self.assertEqual(self.window.left("a"), 2)
        self.window.allow("a")
        self.assertEqual(self.window.left("a"), 1)


class DebounceTest(unittest.TestCase):
    def test_stays(self):
        clock = Clock()
        steady = Debounce(3, clock=clock)
        seen = []
        for now, value in [(0, "a"), (2, "a"), (3, "a"), (4, "b"), (6, "b"), (7, "b"), (8, "a")]:
            clock.now = float(now)
            seen.append(steady.see(value))
        self.assertEqual(seen, [False, False, True, False, False, True, False])

    def test_none_is_a_value(self):
        clock = Clock()
        steady = Debounce(3, clock=clock)
        steady.see(None)
        clock.now = 3.0
        self.assertEqual(steady.see(None), True)


if __name__ == "__main__":
    unittest.main()
