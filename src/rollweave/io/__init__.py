"""Wire frames, whole files and child processes."""
