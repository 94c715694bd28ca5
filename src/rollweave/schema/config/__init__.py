"""The user's configuration: its sections, its rules, and how a file is read."""
