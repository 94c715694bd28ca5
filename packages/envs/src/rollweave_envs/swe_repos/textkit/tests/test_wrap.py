import unittest

from textkit.wrap import indent, justify, shorten, wrap


class WrapTest(unittest.TestCase):
    def test_between_words(self):
        self.assertEqual(wrap("the quick brown fox", 9), ["the quick", "brown fox"])

    def test_exact_width(self):
        self.assertEqual(wrap("aaa bbb", 7), ["aaa bbb"])
        self.assertEqual(wrap("aaa bbb", 6), ["aaa", "bbb"])

    def test_long_words_are_cut(self):
        self.assertEqual(wrap("a abcdefgh b", 3), ["a", "abc", "def", "gh", "b"])

    def test_a_word_of_twice_the_width(self):
        self.assertEqual(wrap("abcdef g", 3), ["abc", "def", "g"])

    def test_nothing(self):
        self.assertEqual(wrap(" \n ", 5), [])

    def test_no_width(self):
        with self.assertRaises(ValueError):
            wrap("a", 0)


class JustifyTest(unittest.TestCase):
    def test_even(self):
        self.assertEqual(justify("a b c", 9), "a   b   c")

    def test_first_gaps_are_wider(self):
        self.assertEqual(justify("a b c d", 9), "a  b  c d")
        self.assertEqual(justify("aa b c", 7), "aa  b c")

    def test_one_word(self):
        self.assertEqual(justify("word", 6), "word  ")


class ShortenTest(unittest.TestCase):
    def test_fits(self):
        self.assertEqual(shorten("one  two", 7), "one two")

    def test_at_a_word(self):
        self.assertEqual(shorten("one two three", 10), "one two...")
        self.assertEqual(shorten("one two three", 9), "one...")

    def test_one_long_word(self):
        self.assertEqual(shorten("abcdefghij", 6), "abc...")

    def test_no_room(self):
        self.assertEqual(shorten("abcdefghij", 2), "..")
        self.assertEqual(shorten("abcdefghij", 3), "...")


class IndentTest(unittest.TestCase):
    def test_lines(self):
        self.assertEqual(indent("a\nb", "> "), "> a\n> b")

    def test_blank_lines_stay(self):
        self.assertEqual(indent("a\n\nb", "  "), "  a\n\n  b")

    def test_first(self):
        self.assertEqual(indent("a\nb", "  ", first="- "), "- a\n  b")
        self.assertEqual(indent("a\nb", "  ", first=""), "a\n  b")


if __name__ == "__main__":
    unittest.main()
