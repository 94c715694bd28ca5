"""Adapters that let other trainers train on a service's rollouts
(`docs/TRAINERS.md`).
"""
