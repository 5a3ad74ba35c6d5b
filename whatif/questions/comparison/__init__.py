"""Two recordings side by side: what changed between them, and which what-if describes it."""
