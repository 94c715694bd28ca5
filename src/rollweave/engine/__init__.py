"""The embedded engine and the clients of every kind of engine."""
