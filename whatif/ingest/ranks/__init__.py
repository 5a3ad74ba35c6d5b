"""Several ranks of one run: on one clock, their collectives matched, waiting told from transfer, as one graph."""
