import unittest

from shelf.memo import lazy, memoize


class MemoizeTest(unittest.TestCase):
    def setUp(self):
        self.called = []

    def test_once_for_equal_calls(self):
        @memoize()
        def double(x):
            self.called.append(x)
            return 2 * x

        self.assertEqual([double(1), double(2), double(1)], [2, 4, 2])
        self.assertEqual(self.called, [1, 2])

    def test_keyword_names_count(self):
        @memoize()
        def area(width=1, height=1):
            return f"{width}x{height}"

        self.assertEqual(area(width=2), "2x1")
        self.assertEqual(area(height=2), "1x2")

    def test_keyword_order_does_not(self):
        @memoize()
        def area(width=1, height=1):
            self.called.append((width, height))
            return width * height

        area(width=2, height=3)
        area(height=3, width=2)
        self.assertEqual(self.called, [(2, 3)])

    def test_none_is_remembered(self):
        @memoize()
        def nothing(x):
            self.called.append(x)

        nothing(1)
        nothing(1)
        self.assertEqual(self.called, [1])

    def test_exceptions_are_not(self):
        @memoize()
        def fails(x):
            self.called.append(x)
            raise LookupError(x)

        for _ in range(2):
            with self.assertRaises(LookupError):
                fails(1)
        self.assertEqual(self.called, [1, 1])

    def test_typed(self):
        @memoize(typed=True)
        def name(x):
            return type(x).__name__

        self.assertEqual([name(1), name(1.0), name(True)], ["int", "float", "bool"])

    def test_functions_share_nothing(self):
        @memoize()
        def one(x):
            return "one"

        @memoize()
        def two(x):
            return "two"

        self.assertEqual([one(1), two(1)], ["one", "two"])

    def test_size(self):
        @memoize(2)
        def double(x):
            self.called.append(x)
            return 2 * x

        for x in (1, 2, 3, 1):
            double(x)
        self.assertEqual(self.called, [1, 2, 3, 1])

    def test_keeps_its_name(self):
        @memoize()
        def special():
            """Says what it does."""

        self.assertEqual(special.__name__, "special")


class Thing:
    computed = 0

    def __init__(self, size):
        self.size = size

    @lazy
    def weight(self):
        Thing.computed += 1
        return self.size * 10


class LazyTest(unittest.TestCase):
    def test_once_for_each_object(self):
        Thing.computed = 0
        a, b = Thing(1), Thing(2)
        self.assertEqual([a.weight, b.weight, a.weight, b.weight], [10, 20, 10, 20])
        self.assertEqual(Thing.computed, 2)


if __name__ == "__main__":
    unittest.main()
