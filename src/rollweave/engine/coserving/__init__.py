"""A serving model and a rollout model in one process, over one pool of pages, of which
one computes at a time (ROSE §4.1).
"""
