"""The INIT/RUN/EVAL pipeline, the episode that drives one trajectory, and the store of
what came of them.
"""
