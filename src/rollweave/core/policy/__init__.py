"""Policies: pure decisions, one question per file, without clock, randomness, I/O or
torch.
"""
