"""Plans the steps of the embedded engine: continuous batching and the blocks of its KV
cache.
"""
