"""The live world: pump, effects of the core's commands, supervisors of processes,
recovery and metrics.
"""
