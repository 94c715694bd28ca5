import unittest

from textkit.names import initials, natural, slug, unique


class SlugTest(unittest.TestCase):
    def test_words(self):
        self.assertEqual(slug("  Hello, World! 2 "), "hello-world-2")

    def test_accents(self):
        self.assertEqual(slug("Crème brûlée"), "creme-brulee")

    def test_longest(self):
        self.assertEqual(slug("one two three", longest=7), "one-two")
        self.assertEqual(slug("one two three", longest=8), "one-two")

    def test_one_long_word(self):
        self.assertEqual(slug("abcdefgh", longest=3), "abc")

    def test_nothing(self):
        self.assertEqual(slug("?!"), "")


class UniqueTest(unittest.TestCase):
    def test_free(self):
        self.assertEqual(unique("a", {"b"}), "a")

    def test_next(self):
        self.assertEqual(unique("a", {"a"}), "a-2")
        self.assertEqual(unique("a", {"a", "a-2", "a-4"}), "a-3")


class InitialsTest(unittest.TestCase):
    def test_parts(self):
        self.assertEqual(initials("Ada M. lovelace"), "AML")

    def test_dashes(self):
        self.assertEqual(initials("Jean-Luc Picard"), "JLP")

    def test_spaces_around(self):
        self.assertEqual(initials(" Ada  Lovelace "), "AL")


class NaturalTest(unittest.TestCase):
    def test_numbers(self):
        self.assertEqual(natural(["a10", "a9", "a1"]), ["a1", "a9", "a10"])

    def test_case(self):
        self.assertEqual(natural(["b1", "A2", "a1"]), ["a1", "A2", "b1"])


if __name__ == "__main__":
    unittest.main()
