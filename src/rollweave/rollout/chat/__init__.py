"""Chat templates, tool calls, and the token-exact codec between messages and tokens."""
