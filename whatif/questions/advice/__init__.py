"""Choose what-ifs to try on a run, try them, and rank them."""
