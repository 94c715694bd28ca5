"""The simulated world: the same core, commands and events, under a virtual clock and
cost models.
"""
