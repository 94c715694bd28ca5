"""Rollouts as a service: the doors of `live/serving.py`, and the gateway for agent programs."""
