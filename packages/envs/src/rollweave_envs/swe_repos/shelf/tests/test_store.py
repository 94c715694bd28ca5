import unittest

from shelf.store import NoTransactionError, Store


class StoreTest(unittest.TestCase):
    def test_set_get_delete(self):
        store = Store({"a": 1})
        store.set("b", 2)
        store.delete("a")
        self.assertEqual((store.get("a"), store.get("b"), store.keys()), (None, 2, ["b"]))

    def test_delete_what_is_not_there(self):
        with self.assertRaises(KeyError):
            Store().delete("a")

    def test_none_is_a_value(self):
        store = Store({"a": None})
        self.assertEqual(store.get("a", "default"), None)
        self.assertEqual("a" in store, True)

    def test_what_goes_in_is_a_copy(self):
        mine = [1]
        store = Store()
        store.set("a", mine)
        mine.append(2)
        self.assertEqual(store.get("a"), [1])

    def test_what_comes_out_is_a_copy(self):
        store = Store({"a": [1]})
        store.get("a").append(2)
        self.assertEqual(store.get("a"), [1])

    def test_the_beginning_is_a_copy(self):
        mine = {"a": [1]}
        store = Store(mine)
        mine["a"].append(2)
        self.assertEqual(store.get("a"), [1])

    def test_increment(self):
        store = Store()
        self.assertEqual([store.increment("n"), store.increment("n", 5), store.increment("n", by=-2)], [1, 6, 4])


class TransactionTest(unittest.TestCase):
    def test_rollback(self):
        store = Store({"a": 1})
        store.begin()
        store.set("a", 2)
        store.set("b", 3)
        self.assertEqual((store.get("a"), store.keys()), (2, ["a", "b"]))
        store.rollback()
        self.assertEqual((store.get("a"), store.keys()), (1, ["a"]))

    def test_commit(self):
        store = Store({"a": 1})
        store.begin()
        store.set("a", 2)
        store.commit()
        self.assertEqual(store.get("a"), 2)

    def test_deleted_inside(self):
        store = Store({"a": 1, "b": 1})
        store.begin()
        store.delete("a")
        self.assertEqual((store.get("a", "gone"), "a" in store, store.keys()), ("gone", False, ["b"]))
        with self.assertRaises(KeyError):
            store.delete("a")
        store.commit()
        self.assertEqual(store.keys(), ["b"])

    def test_nested(self):
        store = Store({"a": 0})
        store.begin()
        store.set("a", 1)
        store.begin()
        store.set("a", 2)
        self.assertEqual(store.get("a"), 2)
        store.rollback()
        self.assertEqual(store.get("a"), 1)
        store.begin()
        store.set("a", 3)
        store.commit()
        self.assertEqual(store.get("a"), 3)
        store.rollback()
        self.assertEqual(store.get("a"), 0)

    def test_nothing_begun(self):
        store = Store()
        with self.assertRaises(NoTransactionError):
            store.commit()
        with self.assertRaises(NoTransactionError):
            store.rollback()


class WatchTest(unittest.TestCase):
    def setUp(self):
        self.heard = []

    def hear(self, key, value):
        self.heard.append((key, value))

    def test_changes(self):
        store = Store()
        store.watch("a", self.hear)
        store.set("a", 1)
        store.set("b", 1)
        store.delete("a")
        self.assertEqual(self.heard, [("a", 1), ("a", None)])

    def test_only_what_lasts(self):
        store = Store()
        store.watch("a", self.hear)
        store.begin()
        store.set("a", 1)
        store.rollback()
        self.assertEqual(self.heard, [])
        store.begin()
        store.set("a", 2)
        store.set("a", 3)
        store.commit()
        self.assertEqual(self.heard, [("a", 3)])

    def test_end(self):
        store = Store()
        stop = store.watch("a", self.hear)
        store.watch("a", self.hear)
        store.set("a", 1)
        stop()
        store.set("a", 2)
        self.assertEqual(self.heard, [("a", 1), ("a", 1), ("a", 2)])

    def test_one_that_ends_itself(self):
        store = Store()

        def once(key, value):
            self.hear(key, value)
            stop()

        stop = store.watch("a", once)
        store.watch("a", self.hear)
        store.set("a", 1)
        self.assertEqual(self.heard, [("a", 1), ("a", 1)])


if __name__ == "__main__":
    unittest.main()
