"""Control of the process for one part of one run: start, release, and supervision."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whatif.instrumentation.kept_memory import KEEP_FREED_MEMORY

from .variants import Options

ROOT = Path(__file__).resolve().parent.parent.parent
POLL_S = 0.02
COMMAND = (sys.executable, "-m", "benchmarks.campaign.run")

CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY}


@dataclass(frozen=True)
class Request:
    """The task of a worker: a part (time | trace | operators | update) of a job, and the paths of its files."""

    part: str
    model: str
    options: Options
    full: bool
    device: str  # cpu | cuda
    result: str
    trace: str
    trace_bytes: int  # limit
    first_round: bool
    # The run that is timed in turn, until the ± of the ratio is below this, percent.
    beside_name: str = ""
    beside: Options | None = None
    goal_pct: float = 0.0

    def to_json(self) -> str:
        """Encode for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """Read back what `to_json` wrote."""
        fields = json.loads(text)
        beside = fields["beside"] and Options(**fields["beside"])
        return cls(**{**fields, "options": Options(**fields["options"]), "beside": beside})


@dataclass(frozen=True)
class Outcome:
    """The outcome of a worker: its result, or one line that says why there is none."""

    result: dict[str, Any]
    failure: str
    cut_off: bool  # stopped because the campaign's time was used up
    seconds: float
    ends_campaign: bool = False  # the failure would occur in every other run


class Worker:
    """A process that prepares its part of a job immediately and begins on `go`."""

    def __init__(self, request: Request, work: Path, log: Path) -> None:
        self._result, self._log = Path(request.result), log
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}
        if request.device == "cpu":
            environment |= CPU_ENVIRONMENT
        command = [*COMMAND, request.to_json()]
        with log.open("w") as stream:
            # A separate session: the campaign handles interrupts at the terminal, and kills the whole session.
            # ROOT holds `benchmarks`.
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=stream, stderr=subprocess.STDOUT,
                start_new_session=True, cwd=ROOT,
            )  # fmt: skip
        self._began_s = time.monotonic()

    def go(self) -> None:
        """Let the worker use the device."""
        self._began_s = time.monotonic()
        assert self._process.stdin is not None
        with suppress(OSError):  # It has exited: `wait` returns the reason.
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()

    def wait(self, timeout_s: float, end_s: float) -> Outcome:
        """Wait for the worker, for at most `timeout_s` and not past `end_s` (on the monotonic clock)."""
        deadline_s = min(self._began_s + timeout_s, end_s)
        while self._process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        late = self._process.poll() is None
        if late:
            self.end()
        seconds = time.monotonic() - self._began_s
        result = _read(self._result)
        if "failure" in result or not (late or result):
            failure = result.get("failure") or self._why()
            return Outcome({}, failure, False, seconds, bool(result.get("ends_campaign")))
        if late:
            reason = f"ended after {seconds:.0f} s: it took too long"
            return Outcome({}, reason, end_s <= self._began_s + timeout_s, seconds)
        return Outcome(result, "", False, seconds)

    def end(self) -> None:
        """Kill the process and everything that it started."""
        # Even if it has exited: a loader's processes outlive it for some seconds, and hold its GPU memory.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _why(self) -> str:
        """Describe a process without a result in one line."""
        status = self._process.returncode
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        if status < 0:
            return f"killed by {signal.Signals(-status).name}; last line: {last}"
        return f"exit status {status}; last line: {last}"


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}
