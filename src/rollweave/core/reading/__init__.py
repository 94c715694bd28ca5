"""Views of the state of a run: what works and what waits (`status`, `waits`), where
every trajectory went (`accounting`), and whether all invariants hold (`checks`).

They only read. The kernel imports none of them; `core/core` puts both together.
"""
