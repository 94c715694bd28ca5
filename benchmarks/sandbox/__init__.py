"""Bench `sandbox`: start times and attacks."""
