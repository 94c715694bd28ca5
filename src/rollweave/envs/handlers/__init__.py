"""Agents with tools in sandboxes: the interface of a handler, and the built-in
handlers.
"""
