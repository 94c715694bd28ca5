import unittest

from routes.graph import Graph, NoWayError


def example():
    return Graph([("a", "b", 4), ("a", "c", 1), ("c", "b", 2), ("b", "d", 5), ("c", "d", 8), ("x", "y", 1)])


class ShortestTest(unittest.TestCase):
    def test_around(self):
        self.assertEqual(example().shortest("a", "b"), (3, ["a", "c", "b"]))
        self.assertEqual(example().shortest("a", "d"), (8, ["a", "c", "b", "d"]))

    def test_itself(self):
        self.assertEqual(example().shortest("d", "d"), (0, ["d"]))

    def test_no_way(self):
        with self.assertRaises(NoWayError):
            example().shortest("d", "a")
        with self.assertRaises(NoWayError):
            example().shortest("a", "nowhere")

    def test_equal_ways_by_name(self):
        graph = Graph([("a", "c", 1), ("c", "d", 1), ("a", "b", 1), ("b", "d", 1)])
        self.assertEqual(graph.shortest("a", "d"), (2, ["a", "b", "d"]))

    def test_circles(self):
        graph = Graph([("a", "b", 1), ("b", "a", 1), ("b", "c", 1)])
        self.assertEqual(graph.shortest("a", "c"), (2, ["a", "b", "c"]))


class EdgeTest(unittest.TestCase):
    def test_the_shorter_edge_counts(self):
        graph = Graph([("a", "b", 5), ("a", "b", 2), ("a", "b", 9)])
        self.assertEqual(graph.following("a"), {"b": 2})

    def test_targets_are_nodes(self):
        self.assertEqual(Graph([("a", "b", 1)]).nodes(), ["a", "b"])

    def test_negative(self):
        with self.assertRaises(ValueError):
            Graph([("a", "b", -1)])

    def test_zero(self):
        self.assertEqual(Graph([("a", "b", 0)]).shortest("a", "b"), (0, ["a", "b"]))

    def test_following_is_a_copy(self):
        graph = example()
        graph.following("a").clear()
        self.assertEqual(graph.following("a"), {"b": 4, "c": 1})

    def test_reverse(self):
        graph = example().reverse()
        self.assertEqual(graph.following("b"), {"a": 4, "c": 2})
        self.assertEqual(graph.nodes(), ["a", "b", "c", "d", "x", "y"])


class WithinTest(unittest.TestCase):
    def test_distances(self):
        self.assertEqual(example().within("a", 3), {"a": 0, "c": 1, "b": 3})
        self.assertEqual(example().within("a", 2), {"a": 0, "c": 1})


class HopsTest(unittest.TestCase):
    def test_edges(self):
        self.assertEqual([example().hops("a", node) for node in "abd"], [0, 1, 2])

    def test_the_least(self):
        graph = Graph([("a", "b", 1), ("b", "z", 1), ("a", "c", 1), ("c", "d", 1), ("d", "z", 1)])
        self.assertEqual(graph.hops("a", "z"), 2)

    def test_no_way(self):
        with self.assertRaises(NoWayError):
            example().hops("a", "x")


class OrderTest(unittest.TestCase):
    def test_edges_point_forward(self):
        self.assertEqual(example().order(), ["a", "c", "b", "d", "x", "y"])

    def test_names_decide(self):
        self.assertEqual(Graph([("b", "z", 1), ("a", "z", 1), ("c", "a", 1)]).order(), ["b", "c", "a", "z"])

    def test_circle(self):
        with self.assertRaises(NoWayError):
            Graph([("a", "b", 1), ("b", "a", 1), ("c", "a", 1)]).order()


class IslandsTest(unittest.TestCase):
    def test_largest_first(self):
        self.assertEqual(example().islands(), [["a", "b", "c", "d"], ["x", "y"]])

    def test_direction_does_not_matter(self):
        graph = Graph([("a", "c", 1), ("b", "c", 1), ("e", "d", 1)])
        self.assertEqual(graph.islands(), [["a", "b", "c"], ["d", "e"]])

    def test_equal_ones_by_name(self):
        graph = Graph([("x", "y", 1), ("c", "d", 1), ("m", "n", 1)])
        self.assertEqual(graph.islands(), [["c", "d"], ["m", "n"], ["x", "y"]])


if __name__ == "__main__":
    unittest.main()
