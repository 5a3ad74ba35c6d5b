"""The op database: measured durations of operators, kept with where they come from, looked up and estimated from."""
