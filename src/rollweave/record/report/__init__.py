"""The report of one run as a page: reads the run directory, draws, and knows nothing of
running.
"""
