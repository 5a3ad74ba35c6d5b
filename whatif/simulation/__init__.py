"""Simulates a task graph: the frontier, schedules, scenarios, and the timeline that results."""
