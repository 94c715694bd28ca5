"""Benches of what the papers compare: placements and predictors of lengths."""
