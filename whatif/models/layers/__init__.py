"""Layers: their calls, their memory, and what changes them."""
