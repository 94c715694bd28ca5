"""Engines that are inference servers of vLLM or SGLang, which a run starts or leases.
What differs between the two is in `vllm` and `sglang`, and in the modules whose names
begin so.
"""
