import unittest

from ledger import money


class ParseTest(unittest.TestCase):
    def test_whole(self):
        self.assertEqual(money.parse("12"), 1200)
        self.assertEqual(money.parse(" 0 "), 0)

    def test_cents(self):
        self.assertEqual(money.parse("12.34"), 1234)
        self.assertEqual(money.parse("0.07"), 7)

    def test_one_decimal(self):
        self.assertEqual(money.parse("12.5"), 1250)

    def test_thousands(self):
        self.assertEqual(money.parse("1,234,567.89"), 123456789)

    def test_negative(self):
        self.assertEqual(money.parse("-3.10"), -310)
        self.assertEqual(money.parse("-0.50"), -50)

    def test_refused(self):
        for text in ("", "1.234", "12,34", "abc", "--1", "1.2.3"):
            with self.assertRaises(ValueError):
                money.parse(text)


class ShowTest(unittest.TestCase):
    def test_small(self):
        self.assertEqual(money.show(5), "0.05")
        self.assertEqual(money.show(1250), "12.50")

    def test_thousands(self):
        self.assertEqual(money.show(123456789), "1,234,567.89")

    def test_negative(self):
        self.assertEqual(money.show(-5), "-0.05")
        self.assertEqual(money.show(-100250), "-1,002.50")


class SplitTest(unittest.TestCase):
    def test_even(self):
        self.assertEqual(money.split(900, 3), [300, 300, 300])

    def test_first_get_more(self):
        self.assertEqual(money.split(1001, 4), [251, 250, 250, 250])
        self.assertEqual(money.split(11, 3), [4, 4, 3])

    def test_adds_up(self):
        self.assertEqual([sum(money.split(cents, 7)) for cents in (0, 1, 6, 7, 8, 1000)], [0, 1, 6, 7, 8, 1000])

    def test_no_parts(self):
        with self.assertRaises(ValueError):
            money.split(100, 0)

    def test_by_weight(self):
        self.assertEqual(money.split_by(100, [1, 1, 2]), [25, 25, 50])
        self.assertEqual(money.split_by(100, [1, 1, 1]), [34, 33, 33])

    def test_largest_remainder(self):
        self.assertEqual(money.split_by(10, [1, 5, 3]), [1, 6, 3])
        self.assertEqual(money.split_by(7, [3, 5]), [3, 4])

    def test_no_weight(self):
        with self.assertRaises(ValueError):
            money.split_by(100, [0, 0])


class ConvertTest(unittest.TestCase):
    def test_rate(self):
        self.assertEqual(money.convert(1000, 120), 1200)

    def test_half_goes_away_from_zero(self):
        self.assertEqual(money.convert(50, 101), 51)
        self.assertEqual(money.convert(-50, 101), -51)

    def test_less_than_half(self):
        self.assertEqual(money.convert(49, 101), 49)

    def test_other_base(self):
        self.assertEqual(money.convert(100, 12345, per=10000), 123)


if __name__ == "__main__":
    unittest.main()
