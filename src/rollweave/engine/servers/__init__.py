"""Engines whose tokens come from an inference server that the run starts or leases.
What differs between servers is in `vllm` and `sglang`, and in the modules whose names
begin so.
"""
