"""The embedded engine, engines that own a vLLM or SGLang server, and the clients of
all.
"""
