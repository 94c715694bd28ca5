"""SGLang as an engine of a run: what differs from the engines of other servers
(`engine/servers`, `docs/ENGINES.md`). It follows the source of SGLang 0.5.23 and was
never run against a real SGLang.
"""
