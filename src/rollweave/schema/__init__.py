"""Frozen structs for events, commands and messages, without behavior beyond their
invariants.
"""
