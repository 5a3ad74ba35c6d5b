"""Models of hardware: GPUs, clusters, links and collective algorithms."""
