"""Bench `weights`: the ways in which weights reach engines."""
