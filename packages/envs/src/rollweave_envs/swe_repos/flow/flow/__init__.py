"""Retries, pools, events and limits for asynchronous work."""
