"""Bench `scheduling`: routing, priorities and migration on a paced engine."""
