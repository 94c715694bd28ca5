"""The command line: what a user reads and types. Decides nothing about runs."""
