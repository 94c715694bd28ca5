"""Clients of engines behind one protocol, for engines in threads, child processes and
behind HTTP.
"""
