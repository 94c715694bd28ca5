"""vLLM as an engine of a run: a child process of ours that owns a vLLM server, and the
plug-in by which that server takes our weights (`docs/ENGINES.md`).
"""
