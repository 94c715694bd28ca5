"""Bench `vllm`: real vLLM servers as the engines of training runs."""
