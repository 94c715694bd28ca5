"""Rollouts as a service: the doors of `runtime/serving.py`."""
