import unittest

from routes.graph import NoWayError
from routes.timetable import Timetable, clock, minutes


def example():
    table = Timetable()
    table.add("R1", [("north", 0, 60), ("middle", 70, 72), ("south", 90, 0)])
    table.add("R2", [("middle", 0, 74), ("east", 80, 0)])
    table.add("R3", [("middle", 0, 73), ("west", 85, 0)])
    table.add("R4", [("middle", 0, 90), ("west", 99, 0)])
    return table


class TimeTest(unittest.TestCase):
    def test_minutes(self):
        self.assertEqual([minutes(text) for text in ("0:00", "7:05", "23:59", "24:00")], [0, 425, 1439, 1440])

    def test_no_times(self):
        for text in ("7", "7:5", "24:01", "12:60", "a:00", "-1:00", "7:005"):
            with self.assertRaises(ValueError):
                minutes(text)

    def test_clock(self):
        self.assertEqual([clock(minute) for minute in (0, 425, 1439)], ["00:00", "07:05", "23:59"])

    def test_days(self):
        self.assertEqual([clock(minute) for minute in (1440, 1450, 4000)], ["00:00+1", "00:10+1", "18:40+2"])


class DeparturesTest(unittest.TestCase):
    def test_at_or_after(self):
        self.assertEqual(example().departures("middle", 73, count=2), [(73, "R3", "west"), (74, "R2", "east")])

    def test_in_order(self):
        self.assertEqual([minute for minute, _, _ in example().departures("middle", 0, count=9)], [72, 73, 74, 90])

    def test_none(self):
        self.assertEqual(example().departures("south", 0), [])


class ArrivalTest(unittest.TestCase):
    def test_same_train(self):
        self.assertEqual(example().arrival("north", "south", 60), 90)

    def test_changing_takes_time(self):
        self.assertEqual(example().arrival("north", "west", 0), 85)
        self.assertEqual(example().arrival("north", "east", 0), 80)

    def test_slow_changers_wait(self):
        table = Timetable(change=10)
        table.add("R1", [("north", 0, 60), ("middle", 70, 0)])
        table.add("R3", [("middle", 0, 73), ("west", 85, 0)])
        table.add("R4", [("middle", 0, 90), ("west", 99, 0)])
        self.assertEqual(table.arrival("north", "west", 0), 99)

    def test_no_change_needed_at_the_start(self):
        self.assertEqual(example().arrival("middle", "west", 73), 85)

    def test_too_late(self):
        with self.assertRaises(NoWayError):
            example().arrival("north", "south", 61)

    def test_trains_that_go_back_in_time(self):
        with self.assertRaises(ValueError):
            Timetable().add("R9", [("a", 0, 10), ("b", 10, 0)])


if __name__ == "__main__":
    unittest.main()
