"""Strips what identifies people from a recording."""
