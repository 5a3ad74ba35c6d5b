"""The fastest or cheapest way to train a step on the GPUs that one has: a search over plans of parallelism."""
