"""vLLM's own tests of its OpenAI-compatible server, run against `rollweave engine`."""
