"""The hosts of a run: the agents that start its processes, and their launchers."""
