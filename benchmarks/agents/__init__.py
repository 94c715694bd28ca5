"""Bench `agents`: features of the gateway, and programs that use them."""
