"""Wire frames, whole files, child processes and HTTP listeners."""
