"""Bench `workers`: what a controller costs with rollout workers."""
