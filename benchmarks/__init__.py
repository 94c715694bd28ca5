"""Benchmarks: each measures and compares in one run, and returns figures and the
conditions under which they hold.

`rollweave.cli.bench.BENCHES` lists them.
"""
