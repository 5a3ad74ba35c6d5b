"""Optimizations, one script each: see ``whatif transforms`` and docs/transforms.md."""
