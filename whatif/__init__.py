"""Says what a change would do to your DNN training before you make it: a trace-driven what-if profiler."""
