"""Graphs and timetables."""
