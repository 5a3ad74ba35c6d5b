"""Clusters: links, topologies from files and presets, and the cost of exchanging data over them."""
