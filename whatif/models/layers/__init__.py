"""Layers: their calls, their memory, and changes of them."""
