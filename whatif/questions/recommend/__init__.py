"""Devices ranked by what a recorded step would take and cost on each of them."""
