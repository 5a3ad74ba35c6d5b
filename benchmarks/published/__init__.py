"""Score predictions against published measurements: one module per table, each with ``score(data) -> Scores``."""
