import unittest

from ledger.accounts import Ledger
from ledger.report import by_period, statement, top_memos, tree


def example():
    book = Ledger(["income", "cash", "shops:food", "shops:books"])
    book.transfer(1, "income", "cash", 10000, "wage")
    book.transfer(2, "cash", "shops:food", 1250, "bread")
    book.transfer(30, "cash", "shops:books", 2000, "novel")
    book.transfer(31, "cash", "shops:food", 750, "bread")
    book.transfer(61, "cash", "shops:food", 500, "apple")
    return book


class StatementTest(unittest.TestCase):
    def test_all(self):
        lines = statement(example(), "cash")
        self.assertEqual(lines[0], "   1       100.00       100.00 wage")
        self.assertEqual(lines[-1], "  61        -5.00        55.00 apple")
        self.assertEqual(len(lines), 5)

    def test_starts_with_what_was_before(self):
        lines = statement(example(), "cash", first=30)
        self.assertEqual(lines[0], "  30       -20.00        67.50 novel")

    def test_both_days_are_included(self):
        lines = statement(example(), "cash", first=2, last=31)
        self.assertEqual([line.split()[0] for line in lines], ["2", "30", "31"])


class PeriodTest(unittest.TestCase):
    def test_months(self):
        self.assertEqual(by_period(example(), "cash"), {0: 6750, 1: -750, 2: -500})

    def test_weeks(self):
        self.assertEqual(by_period(example(), "shops:food", days=7), {0: 1250, 4: 750, 8: 500})


class TopTest(unittest.TestCase):
    def test_most_first(self):
        self.assertEqual(top_memos(example(), "cash", 1), [("bread", 2000)])

    def test_equal_ones_by_name(self):
        self.assertEqual(top_memos(example(), "cash"), [("bread", 2000), ("novel", 2000), ("apple", 500)])

    def test_income_is_not_spent(self):
        self.assertEqual([memo for memo, _ in top_memos(example(), "cash", 10)], ["bread", "novel", "apple"])


class TreeTest(unittest.TestCase):
    def test_parents_once(self):
        names = ["shops:food", "shops:books", "cash"]
        self.assertEqual(
            tree(example(), names), ["cash 55.00", "shops 45.00", "  books 20.00", "  food 25.00"]
        )


if __name__ == "__main__":
    unittest.main()
