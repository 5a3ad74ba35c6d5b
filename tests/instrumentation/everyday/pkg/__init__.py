"""A package whose module is run with `python -m`."""
