"""Rollouts as a service: the HTTP API, its clients, and adapters to other trainers."""
