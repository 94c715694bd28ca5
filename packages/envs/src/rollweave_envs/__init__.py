"""Tasks and adapters for Rollweave: coding, bug fixing, mathematics and science with
tools, and the environments of gymnasium, reasoning-gym, GEM, TextWorld, verifiers and
OpenEnv.
"""
