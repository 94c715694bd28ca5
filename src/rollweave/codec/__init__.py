"""Bytes and their meaning: frames on a wire, the journal, chat as tokens, the configuration file."""
