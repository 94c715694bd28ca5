"""Connections from the controller to its trainer ranks and relays."""
