"""Entry points of all child processes: engines, trainer ranks, relays, rollout workers,
roles, the predictor, agents and Ray's launcher.
"""
