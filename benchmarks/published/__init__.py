"""Predictions of what others published, scored: one module a table, each with ``score(data) -> Scores``."""
