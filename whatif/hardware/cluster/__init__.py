"""Clusters: links, topologies from files and presets, and what it costs to exchange data over them."""
