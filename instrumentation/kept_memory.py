"""An environment in which a process keeps the memory that it frees."""

# For the C library's allocator (mallopt(3)). On a virtual machine the page fault on a page that was returned to the
# system can take longer than the operator that touches it, and the profiler's memory makes that worse at each step.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(2_000_000_000),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
