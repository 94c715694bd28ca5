"""Environments: their interface, their isolation, the built-in ones, and the source of
their tasks.
"""
