"""Conversations as tokens: chat templates, tool calls and token codecs."""
