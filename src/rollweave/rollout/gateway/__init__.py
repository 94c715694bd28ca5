"""OpenAI's chat API in front of the agent's turns, and what becomes of them: sequences
to train on.
"""
