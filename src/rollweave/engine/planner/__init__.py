"""What the embedded engine runs next: continuous batching and the blocks of its KV
cache.
"""
