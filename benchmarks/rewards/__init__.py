"""Bench `rewards`: where rewards beside the environment's run, and what is lost."""
