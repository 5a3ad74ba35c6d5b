"""Answers to what users ask: why, what helps, what changes, what fits."""
