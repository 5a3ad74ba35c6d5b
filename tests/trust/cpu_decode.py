"""Record decode steps of a small Llama on a CPU at batch 1, 2 and 8: what a step with a larger batch costs.

    python -m tests.trust.cpu_decode [FOLDER]

Needs torch and transformers; one thread. Writes decode_b1.json, decode_b2.json and decode_b8.json, and prints the
untraced times: the medians of rounds that take turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

CONTEXT, STEPS, WARM_UP, ROUNDS = 256, 20, 4, 7
BATCHES = (1, 2, 8)


def main(folder: Path) -> None:
    """Measure and record."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.cache_utils import DynamicCache

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=8000,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()

    def decode(batch: int, steps: int, profiler: Any = None) -> float:
        """Return the median time of a step, ms."""
        cache, times_ms = DynamicCache(), []
        with torch.inference_mode():
            model(input_ids=torch.randint(0, 8000, (batch, CONTEXT)), past_key_values=cache, use_cache=True)
            ids = torch.randint(0, 8000, (batch, 1))
            for _ in range(steps):
                start_s = time.perf_counter()
                model(input_ids=ids, past_key_values=cache, use_cache=True)
                times_ms.append(1e3 * (time.perf_counter() - start_s))
                if profiler:
                    profiler.step()
        return statistics.median(times_ms[WARM_UP:])

    for batch in BATCHES:
        path = folder / f"decode_b{batch}.json"
        plan = schedule(wait=2, warmup=2, active=8, repeat=1)

        def write(done: Any, path: Path = path) -> None:
            done.export_chrome_trace(str(path))

        with profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan, on_trace_ready=write
        ) as profiler:
            decode(batch, 14, profiler)
        print(path, flush=True)
    rounds = [[decode(batch, STEPS) for batch in BATCHES] for _ in range(ROUNDS)]
    for batch, times_ms in zip(BATCHES, zip(*rounds, strict=True), strict=True):
        spread = ", ".join(f"{ms:.1f}" for ms in sorted(times_ms))
        print(f"batch {batch}, context {CONTEXT}: {statistics.median(times_ms):.2f} ms ({spread})", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
