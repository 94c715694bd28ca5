"""Clients of engines behind one protocol, and the child processes that engines and
trainers live in.
"""
