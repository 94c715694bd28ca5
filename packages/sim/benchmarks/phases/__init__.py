"""Bench `phases`: prefill and decoding on different engines."""
