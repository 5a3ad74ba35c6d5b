"""Parallel training: pipeline, tensor and sharded data parallelism."""
