"""Sandboxes, and the tools inside them."""
