"""Bench `workers`: the controller's CPU time with rollout workers."""
