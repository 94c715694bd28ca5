"""Physical pages of memory that models share: each model has a range of addresses, and
pages move between the ranges without a copy (ROSE §4.1).
"""
