"""The trainer: advantages, losses, packing, the optimizer step, checkpoints,
warm-up.
"""
