"""The nouns of the system: frozen structs without behaviour beyond their invariants."""
