"""Times of commands at a shell."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from inputs import trace
from measure import Row, command_cpu_s

WHATIF = (sys.executable, "-m", "whatif")
_IMPORTS_NUMPY = "import sys; from whatif.cli.main import main; main(['--help']); sys.exit('numpy' in sys.modules)"


def command_line(rounds: int, quick: bool, large: bool) -> Iterator[Row]:
    """CPU time of whole processes, the minimum of the rounds; later rounds have cached byte code and graphs."""
    v100, v100_twice, small = (str(trace(name)) for name in ("v100-50", "v100-100", "own-small"))
    with tempfile.TemporaryDirectory() as folder:
        kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder, "WHATIF_CACHE": folder}
        out = str(Path(folder, "out"))
        # Title, command, budget and stretch goal in seconds.
        asked: list[tuple[str, tuple[str, ...], float, float | None]] = [
            ("info, trace of 0.3 MB", ("info", small), 0.3, None),
            ("apply scale, trace of 0.3 MB", ("apply", "scale:kind=cpu,factor=0.5", small), 1, None),
            ("apply amp, 54 MB, first question", ("apply", "amp", v100, "--no-cache"), 1.0, 0.7),
            ("apply amp, 54 MB, second question", ("apply", "amp", v100), 0.5, 0.4),
            ("apply amp, 108 MB, first question", ("apply", "amp", v100_twice, "--no-cache"), 1.5, 1.2),
            ("explain --sensitivity, 54 MB", ("explain", "--sensitivity", v100), 1, None),
            ("memory, 54 MB", ("memory", v100), 1, None),
            ("export, 54 MB", ("export", v100, "-o", f"{out}.json.gz"), 1, None),
            ("compare, 54 MB with itself", ("compare", v100, v100), 1, None),
            ("check, 54 MB with itself", ("check", v100, "--baseline", v100), 1, None),
            ("advise, 108 MB", ("advise", v100_twice), 3, None),
            ("report, 54 MB", ("report", v100, "-o", f"{out}.html"), 2, None),
        ]
        commands = {title: (*WHATIF, *words) for title, words, _, _ in asked}
        commands |= {"bare": (sys.executable, "-c", "pass"), "help": (*WHATIF, "--help")}
        least = dict.fromkeys(commands, float("inf"))
        for _ in range(max(rounds, 2)):
            for title, command in commands.items():
                least[title] = min(least[title], command_cpu_s(command, kept))
    yield Row("command", "whatif --help over python -c pass", least["help"] / least["bare"], "x", 6, None, True)
    numpy = subprocess.run([sys.executable, "-c", _IMPORTS_NUMPY], stdout=subprocess.DEVNULL, check=False).returncode
    yield Row("command", "whatif --help imports numpy (0: no)", numpy, "", 0, None, True)
    for title, _, budget, stretch in asked:
        yield Row("command", title, least[title], "s", budget, stretch, True)
