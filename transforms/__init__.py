"""Optimizations, one script each: see ``whatif transforms``."""
