"""What a run writes down, in whichever world it happens: its directory, journal, trace,
metrics of a step, summary.
"""
