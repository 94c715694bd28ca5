"""Modules that run in the process of a serving engine that lends."""
