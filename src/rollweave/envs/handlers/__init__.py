"""Agents with tools in sandboxes: the interface of a handler, and those that come with
us.
"""
