"""Several ranks of one run: on one clock, their collectives matched, waiting separated from transfer, as one graph."""
