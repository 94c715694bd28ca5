"""Bench `service`: rollouts over HTTP."""
