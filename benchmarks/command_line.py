"""What a user waits for at a shell."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from inputs import trace
from measure import Row, command_cpu_s

WHATIF = (sys.executable, "-m", "whatif")
APPLY = (*WHATIF, "apply", "scale:kind=gpu,factor=0.5")
# The small trace of the project's own runs on a CPU.
APPLY_CPU = (*WHATIF, "apply", "scale:kind=cpu,factor=0.5")
_IMPORTS_NUMPY = "import sys; from whatif.cli.main import main; main(['--help']); sys.exit('numpy' in sys.modules)"


def command_line(rounds: int, quick: bool, large: bool) -> Iterator[Row]:
    """CPU time of whole processes."""
    medium, small, own = str(trace("v100-50")), str(trace("h100-small")), str(trace("own-small"))
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for key, command in (
            ("bare", [sys.executable, "-c", "pass"]),
            ("help", [*WHATIF, "--help"]),
            ("medium", [*APPLY, medium]),
            ("small", [*APPLY, small]),
            ("own", [*APPLY_CPU, own]),
        ):
            seconds.setdefault(key, []).append(command_cpu_s(command, {}))
    least = {key: min(values) for key, values in seconds.items()}
    yield Row("command", "whatif --help over python -c pass", least["help"] / least["bare"], "x", 6, None, True)
    numpy = subprocess.run([sys.executable, "-c", _IMPORTS_NUMPY], stdout=subprocess.DEVNULL, check=False).returncode
    yield Row("command", "whatif --help imports numpy (0: no)", numpy, "", 0, None, True)
    yield Row("command", "apply scale, 50 MB trace", least["medium"], "s", 1.2, 0.8, True)
    yield Row("command", "apply scale, trace under 10 MB (H100)", least["small"], "s", 1, None, True)
    yield Row("command", "apply scale, trace under 10 MB (own, CPU)", least["own"], "s", 1, None, True)
