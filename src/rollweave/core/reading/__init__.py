"""Views of the state of a run: what works, what waits and where every trajectory went
(`status`, `waits`), and whether all invariants hold (`checks`).

They only read. The kernel imports none of them; `core/core` puts both together.
"""
