"""Roles: groups of worker processes that are called as one (RollArt §5)."""
