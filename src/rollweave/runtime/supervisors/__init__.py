"""Supervisors of the child processes: start, watch, replace."""
