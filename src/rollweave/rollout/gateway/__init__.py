"""OpenAI's chat API in front of the agent's turns, and the training sequences that it
records.
"""
