"""Bench `engine` and the measurement of engine profiles."""
