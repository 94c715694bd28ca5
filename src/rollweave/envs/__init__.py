"""Environments: what they owe, where they run, the built-in ones, and the source of
their tasks.
"""
