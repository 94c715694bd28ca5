"""The papers' experiments on the simulated world, side by side with the published
results.
"""

from rollweave_papers import sharing as sharing  # adds ROSE's baselines to the simulator
