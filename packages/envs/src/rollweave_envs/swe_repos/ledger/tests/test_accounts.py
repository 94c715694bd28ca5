import unittest

from ledger.accounts import Ledger, UnbalancedError, UnknownAccountError


def example():
    book = Ledger(["income", "cash"])
    book.open("assets:bank", limit=5000)
    book.open("assets:bonds")
    return book


class PostTest(unittest.TestCase):
    def test_balances(self):
        book = example()
        book.post(1, [("income", -1000), ("assets:bank", 700), ("cash", 300)])
        self.assertEqual(book.balance("assets:bank"), 700)
        self.assertEqual(book.balance("income"), -1000)

    def test_unbalanced(self):
        book = example()
        with self.assertRaises(UnbalancedError):
            book.post(1, [("income", -1000), ("cash", 999)])
        self.assertEqual(book.entries(), [])

    def test_unknown(self):
        book = example()
        with self.assertRaises(UnknownAccountError):
            book.post(1, [("nowhere", -1000), ("cash", 1000)])
        with self.assertRaises(UnknownAccountError):
            book.balance("nowhere")

    def test_lines_may_be_a_generator(self):
        book = example()
        book.post(1, ((name, cents) for name, cents in [("income", -5), ("cash", 5)]))
        self.assertEqual(book.balance("cash"), 5)

    def test_limit(self):
        book = example()
        book.transfer(1, "assets:bank", "cash", 5000)
        with self.assertRaises(ValueError):
            book.transfer(2, "assets:bank", "cash", 1)
        self.assertEqual(book.balance("cash"), 5000)

    def test_limit_of_zero(self):
        book = Ledger(["cash"])
        book.open("purse", limit=0)
        with self.assertRaises(ValueError):
            book.transfer(1, "purse", "cash", 1)
        self.assertEqual(book.balance("purse"), 0)

    def test_limit_counts_all_lines_of_a_posting(self):
        book = example()
        with self.assertRaises(ValueError):
            book.post(1, [("assets:bank", -3000), ("assets:bank", -3000), ("cash", 6000)])
        book.post(1, [("assets:bank", -6000), ("assets:bank", 1000), ("cash", 5000)])
        self.assertEqual(book.balance("assets:bank"), -5000)

    def test_open_twice(self):
        book = example()
        with self.assertRaises(ValueError):
            book.open("cash")

    def test_the_callers_list_is_its_own(self):
        names = ["cash"]
        Ledger(names).open("bank")
        self.assertEqual(names, ["cash"])

    def test_ledgers_share_nothing(self):
        Ledger().open("cash")
        other = Ledger()
        other.open("cash")
        with self.assertRaises(UnknownAccountError):
            other.balance("bank")


class TransferTest(unittest.TestCase):
    def test_direction(self):
        book = example()
        book.transfer(1, "income", "cash", 250)
        self.assertEqual((book.balance("income"), book.balance("cash")), (-250, 250))

    def test_positive(self):
        book = example()
        for cents in (0, -5):
            with self.assertRaises(ValueError):
                book.transfer(1, "income", "cash", cents)


class BalanceTest(unittest.TestCase):
    def test_accounts_below(self):
        book = example()
        book.transfer(1, "income", "assets:bank", 100)
        book.transfer(1, "income", "assets:bonds", 50)
        self.assertEqual(book.balance("assets"), 150)

    def test_names_that_begin_alike(self):
        book = Ledger(["income", "cash", "cashback"])
        book.transfer(1, "income", "cashback", 7)
        self.assertEqual(book.balance("cash"), 0)

    def test_until_a_day(self):
        book = example()
        for day in (1, 2, 3):
            book.transfer(day, "income", "cash", 10**day)
        self.assertEqual(book.balance("cash", until=2), 110)
        self.assertEqual(book.balance("cash", until=0), 0)

    def test_entries_by_day(self):
        book = example()
        book.transfer(3, "income", "cash", 1, "c")
        book.transfer(1, "income", "cash", 9, "a")
        book.transfer(1, "income", "cash", 2, "b")
        self.assertEqual([entry.memo for entry in book.entries("cash")], ["a", "b", "c"])


if __name__ == "__main__":
    unittest.main()
