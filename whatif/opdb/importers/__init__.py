"""Readers of foreign measurements: each returns rows and their origin, and writes nothing."""
