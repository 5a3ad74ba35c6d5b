"""A recording that names a GPU and holds no GPU work, as when the driver refuses to trace it.

    python -m tests.trust.no_gpu_events [RECORDING]

Seen today: `whatif info` says that answers are void, and `whatif explain` refuses it.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

from tests.trust.common import TRACES, call, loaded, written


def main(recording: Path) -> None:
    """Print the status, the warnings and the trust value of both commands."""
    trace = loaded(recording)
    trace["whatif"] |= {"gpu": "NVIDIA H100 80GB HBM3", "cuda": "13.0", "peak_memory_bytes": 10**9}
    trace["whatif"].pop("untraced_cpu_ms", None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "no_gpu_events.json.gz"
        path.write_bytes(gzip.compress(written(trace), 1))
        for command in ("info", "explain"):
            outcome = call(command, path, "--json")
            answer = json.loads(outcome.out or "{}")
            print(
                f"{command}: status {outcome.status}, trust {answer.get('trust')!r}, warnings {answer.get('warnings')}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TRACES / "transformer_cpu.json.gz")
