"""Bench `dapo`: asynchronous DAPO, simulated and live."""
