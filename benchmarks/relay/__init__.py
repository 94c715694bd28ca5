"""Bench `relay`: weight broadcasts between hosts."""
