"""The papers' experiments on the simulated world, side by side with what was published."""
