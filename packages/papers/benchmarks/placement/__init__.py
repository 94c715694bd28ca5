"""Bench `placement`: exact placement and Heddle's searches."""
