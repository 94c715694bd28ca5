"""Money, accounts and statements."""
