"""Bench `affinity`: task domains on pools of different GPUs."""
