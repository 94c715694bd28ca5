"""Caches, memoised functions, and a store with transactions."""
