"""Measures operators alone, by a long and a short chain, for the op database (docs/profile.md)."""
