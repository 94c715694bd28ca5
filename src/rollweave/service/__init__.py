"""Rollouts as a service: the doors of `live/serving.py`."""
