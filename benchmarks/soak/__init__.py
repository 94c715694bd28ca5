"""Bench `soak`: a run whose processes are killed."""
