"""The op database: measured durations of operators with their origin, for look-up and estimates."""
