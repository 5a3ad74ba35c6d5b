"""What hardware can do: GPUs, clusters, links and collective algorithms."""
