"""The hosts of a run: agents that start its processes there, and launchers of
agents.
"""
