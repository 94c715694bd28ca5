import unittest

from textkit.table import group, sort, table


class TableTest(unittest.TestCase):
    def test_left(self):
        self.assertEqual(table([["a", 1], ["bbb", 22]]), ["a    1", "bbb  22"])

    def test_right(self):
        self.assertEqual(table([["a", 1], ["bbb", 22]], align="lr"), ["a     1", "bbb  22"])

    def test_centre(self):
        self.assertEqual(table([["a", "x"], ["abcd", "x"]], align="c"), [" a    x", "abcd  x"])

    def test_decimal_points(self):
        rows = [["1.5"], ["10"], ["-0.125"]]
        self.assertEqual(table(rows, align="d"), [" 1.5", "10", "-0.125"])

    def test_headers(self):
        self.assertEqual(table([["a", 1]], ["name", "n"]), ["name  n", "----  -", "a     1"])

    def test_headers_alone(self):
        self.assertEqual(table([], ["name", "n"]), ["name  n", "----  -"])

    def test_nothing(self):
        self.assertEqual(table([]), [])

    def test_short_rows(self):
        self.assertEqual(table([["a"], ["b", "c"]]), ["a", "b  c"])

    def test_values(self):
        self.assertEqual(table([[None, 0, 1.0]], gap="|"), ["|0|1.00"])

    def test_rows_are_left_alone(self):
        rows = [["a"], ["b", "c"]]
        table(rows, ["x", "y"])
        self.assertEqual(rows, [["a"], ["b", "c"]])


class GroupTest(unittest.TestCase):
    def test_order(self):
        rows = [("b", 1), ("a", 2), ("b", 3)]
        self.assertEqual(group(rows, 0), [("b", [("b", 1), ("b", 3)]), ("a", [("a", 2)])])


class SortTest(unittest.TestCase):
    def test_columns(self):
        rows = [("b", 2), ("a", 2), ("c", 1)]
        self.assertEqual(sort(rows, 1, 0), [("c", 1), ("a", 2), ("b", 2)])

    def test_downwards(self):
        rows = [("b", 2), ("a", 2), ("c", 1)]
        self.assertEqual(sort(rows, -2, 0), [("a", 2), ("b", 2), ("c", 1)])
        self.assertEqual(sort(rows, -1), [("c", 1), ("b", 2), ("a", 2)])

    def test_stable(self):
        rows = [("b", 2), ("a", 2), ("c", 2)]
        self.assertEqual(sort(rows, 1), [("b", 2), ("a", 2), ("c", 2)])
        self.assertEqual(sort(rows, -2), [("b", 2), ("a", 2), ("c", 2)])


if __name__ == "__main__":
    unittest.main()
