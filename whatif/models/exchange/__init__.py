"""Gradient exchange: buckets, collectives, parameter servers, contention."""
