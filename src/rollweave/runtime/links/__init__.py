"""Connections from the controller to its trainer ranks, relays and rollout workers."""
