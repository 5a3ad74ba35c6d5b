"""Benchmarks of this project and its rivals, and the campaign and the lab, which measure real training."""
