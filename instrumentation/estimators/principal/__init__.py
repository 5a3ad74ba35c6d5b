"""Tianshu's estimator: a principal component that is searched, and a small network that is trained on it (torch)."""
