"""Records a run through CUPTI's activity records, without torch's profiler (docs/cupti.md)."""
