"""Trainers of other makes on rollouts of a service: what `docs/TRAINERS.md` shows."""
