"""Benches of the simulator, and benches that measure live runs beside its figures."""
