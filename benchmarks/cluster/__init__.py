"""Bench `cluster`: runs on several hosts, which are lost."""
