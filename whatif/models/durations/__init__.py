"""Durations of operators and kernels under changed conditions."""
