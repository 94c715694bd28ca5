"""Publish weights, and load them: bytes under a manifest, verified before anyone uses
them.
"""
