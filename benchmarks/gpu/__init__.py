"""Bench `gpu`: an engine and a trainer on one GPU."""
