"""The files that a run writes, in either world: its directory, journal, trace, step
metrics and summary.
"""
