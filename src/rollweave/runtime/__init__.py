"""The live world: the pump, the effects of the core's commands, processes, recovery,
metrics and traces.
"""
