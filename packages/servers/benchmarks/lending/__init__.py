"""Bench `coserve --engine vllm`."""
