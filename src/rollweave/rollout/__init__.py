"""The INIT/RUN/EVAL pipeline, the drivers of one attempt, the chat codec and the
gateway for agent programs.
"""
