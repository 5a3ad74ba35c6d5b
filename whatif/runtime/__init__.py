"""How hot loops run: compiled ahead of time, or the same files as plain Python."""
