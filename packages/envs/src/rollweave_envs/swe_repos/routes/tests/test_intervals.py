import unittest

from routes.intervals import free, merge, most_at_once, most_without_overlap, overlap


class MergeTest(unittest.TestCase):
    def test_overlaps(self):
        self.assertEqual(merge([(5, 8), (1, 3), (2, 4)]), [(1, 4), (5, 8)])

    def test_touching(self):
        self.assertEqual(merge([(1, 2), (2, 3)]), [(1, 3)])

    def test_inside(self):
        self.assertEqual(merge([(1, 9), (2, 3), (4, 5)]), [(1, 9)])

    def test_empty(self):
        self.assertEqual(merge([(3, 3), (5, 4)]), [])


class FreeTest(unittest.TestCase):
    def test_gaps(self):
        self.assertEqual(free([(2, 4), (6, 7)], 0, 10), [(0, 2), (4, 6), (7, 10)])

    def test_least(self):
        self.assertEqual(free([(2, 4), (6, 7)], 0, 10, least=3), [(7, 10)])
        self.assertEqual(free([(2, 4), (6, 7)], 0, 10, least=2), [(0, 2), (4, 6), (7, 10)])

    def test_busy_outside(self):
        self.assertEqual(free([(-5, 1), (9, 20)], 0, 10), [(1, 9)])
        self.assertEqual(free([(12, 20)], 0, 10), [(0, 10)])

    def test_busy_before(self):
        self.assertEqual(free([(-5, -2)], 0, 10), [(0, 10)])

    def test_nothing_busy(self):
        self.assertEqual(free([], 3, 5), [(3, 5)])

    def test_all_busy(self):
        self.assertEqual(free([(0, 10)], 0, 10), [])


class OverlapTest(unittest.TestCase):
    def test_common(self):
        self.assertEqual(overlap((0, 5), (3, 9)), 2)
        self.assertEqual(overlap((0, 9), (3, 4)), 1)

    def test_none(self):
        self.assertEqual(overlap((0, 3), (3, 9)), 0)
        self.assertEqual(overlap((5, 6), (1, 2)), 0)


class MostTest(unittest.TestCase):
    def test_at_once(self):
        self.assertEqual(most_at_once([(0, 5), (1, 3), (2, 9), (4, 6)]), 3)

    def test_ends_do_not_count(self):
        self.assertEqual(most_at_once([(0, 2), (2, 4), (4, 6)]), 1)

    def test_without_overlap(self):
        self.assertEqual(most_without_overlap([(0, 6), (1, 3), (3, 5), (4, 9), (5, 7)]), [(1, 3), (3, 5), (5, 7)])

    def test_a_long_one_first(self):
        self.assertEqual(most_without_overlap([(0, 10), (8, 11), (1, 2)]), [(1, 2), (8, 11)])


if __name__ == "__main__":
    unittest.main()
