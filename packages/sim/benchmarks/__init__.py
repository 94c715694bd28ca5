"""Benches of the simulator: its speed and fault search."""
