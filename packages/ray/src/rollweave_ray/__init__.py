"""Rollweave on Ray: agents on the nodes of a Ray cluster, and serverless functions on
Ray Serve.
"""
