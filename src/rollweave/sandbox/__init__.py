"""The protocol of sandboxes, and the tools inside them. The sandboxes themselves are in
the distribution `rollweave-sandbox`, which `provider.py` finds.
"""
