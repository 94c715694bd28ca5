"""Rollweave trains LLM agents with reinforcement learning, each trajectory at its own pace."""

__version__ = "0.1.0"
