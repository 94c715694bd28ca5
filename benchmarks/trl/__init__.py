"""Bench `trl`: TRL's GRPOTrainer, in an interpreter that has it, beside our own
runs.
"""
