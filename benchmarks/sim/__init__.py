"""Benches of the simulator: its speed, its fidelity and fault search."""
