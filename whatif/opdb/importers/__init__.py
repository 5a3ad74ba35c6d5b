"""Readers of other people's measurements: each gives rows and their origin, and writes nothing."""
