"""Pure decisions, one question a file: no clock, no randomness of their own, no I/O, no
torch.
"""
