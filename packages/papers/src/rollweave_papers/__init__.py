"""The papers' experiments on the simulated world, side by side with the published
results.
"""
