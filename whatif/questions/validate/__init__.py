"""Predictions against measured ground truth."""
