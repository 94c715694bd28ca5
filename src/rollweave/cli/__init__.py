"""The command line: reads options, starts the work, and prints results. It makes no
decisions about runs.
"""
