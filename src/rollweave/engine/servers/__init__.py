"""Engines whose tokens come from an inference server that the run starts or leases:
what all kinds of servers share. `engine/vllm` and `engine/sglang` have what differs.
"""
