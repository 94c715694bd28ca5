"""Checks that run before anything starts: the configuration, environments, model and
memory.
"""
