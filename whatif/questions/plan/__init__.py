"""Search the plans of parallelism for the fastest or cheapest one on given GPUs."""
