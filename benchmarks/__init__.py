"""Benchmarks: each measures and compares in one run.

Each returns figures and the conditions under which they hold.
"""
