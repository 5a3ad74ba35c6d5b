"""Simulation of a task graph: the frontier, schedules, scenarios, and the resulting timeline."""
