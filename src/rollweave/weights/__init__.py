"""Publishes, transfers and loads weights: bytes under a manifest, verified before
use.
"""
