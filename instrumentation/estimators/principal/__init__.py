"""Tianshu's estimator: a search for a principal component, and a small network trained on it (torch)."""
