"""Benches: measure and compare in one run.

Each gives figures and the conditions under which they hold.
"""
