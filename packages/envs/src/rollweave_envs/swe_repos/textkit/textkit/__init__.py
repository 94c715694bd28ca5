"""Wrapping, tables, templates and names."""
