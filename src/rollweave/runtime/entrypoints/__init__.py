"""Entry points of all child processes: engines, trainer ranks, relays, rollout workers,
roles, the predictor and agents.
"""
