"""Hosts with their own network: namespaces of this machine on bridges, with rate-limited links.

Linux only, and as root: `ip` and `tc` of iproute2. Every link is a pair of virtual Ethernet devices whose two ends
send through a token bucket (tc-tbf(8)), so both directions have the same rate and do not share it.
"""

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from whatif.runtime.errors import WhatifError

# A namespace is `PREFIX-<process>-<part>`: those of a lab whose process is gone may be removed.
PREFIX = "whatif-lab"
_NAME = re.compile(rf"{PREFIX}-(\d+)-\w+")

INTERFACE = "lab0"  # of every host
SWITCH = "switch"  # the namespace of all bridges
MOST_HOSTS = 64
NETWORK = "10.77.0.0/24"  # of all of them
# Frames of 1,514 bytes for 1,448 of a message, and a reserve: a twelfth of a packet of 16 kB.
HEADER_BYTES = 2_000

# The burst of an idle link: a millisecond of its rate, but no less than the largest packet that the
# kernel hands over in one piece, or a CPU that should train would have to split it.
BURST_S, FEWEST_BURST_BYTES = 1e-3, 70_000
# The queue of a link before it drops packets; it is smaller than a sender's socket buffer.
QUEUE = "100ms"


@dataclass(frozen=True)
class Host:
    """One host: the namespace of its processes, and its address in the lab's network."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs `words` on this host."""
        return ["ip", "netns", "exec", self.namespace, *words]


class Hosts:
    """Groups of hosts for the duration of a `with` block, which removes them even on an exception or a signal.

    `groups` has the hosts of each bridge. `rate_mbit_s` is the rate of each host's link, `uplink_mbit_s` that of
    the link from a group to the others, shared by its hosts; None: no limit. `packet_bytes` is the
    largest burst of a link, for messages that would fit into the usual burst at any rate. Raises
    WhatifError if the lab cannot work: not Linux, not root, no `ip` or `tc`.
    """

    def __init__(
        self, groups: Sequence[int] = (2,), *, rate_mbit_s: float | None = None, uplink_mbit_s: float | None = None,
        packet_bytes: int | None = None,
    ) -> None:  # fmt: skip
        if not groups or min(groups) < 1 or sum(groups) > MOST_HOSTS:
            raise WhatifError(f"lab: expected groups of 1 to {MOST_HOSTS} hosts in all, got {list(groups)}.")
        for rate in (rate_mbit_s, uplink_mbit_s):
            _check_rate(rate)
        check_machine()
        self._groups, self._rate, self._uplink = tuple(groups), rate_mbit_s, uplink_mbit_s
        self._packet_bytes = packet_bytes
        self._prefix = f"{PREFIX}-{os.getpid()}"
        self._switch = f"{self._prefix}-{SWITCH}"
        self.hosts = tuple(
            Host(f"{self._prefix}-host{number}", f"10.77.0.{number + 1}") for number in range(sum(groups))
        )
        self._signals: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if any(namespace == self._switch for namespace in namespaces()):
            raise WhatifError("lab: expected one set of hosts at a time in a process, got a second one.")
        # SIGINT already raises an exception; SIGTERM must as well, or nothing would be removed.
        if threading.current_thread() is threading.main_thread():
            self._signals[signal.SIGTERM] = signal.signal(signal.SIGTERM, _interrupt)
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    def set_rate(self, rate_mbit_s: float | None) -> None:
        """Set the rate of every host's link in both directions; None removes the limit."""
        _check_rate(rate_mbit_s)
        for number, host in enumerate(self.hosts):
            _limit(host.namespace, INTERFACE, rate_mbit_s, self._packet_bytes)
            _limit(self._switch, f"port{number}", rate_mbit_s, self._packet_bytes)

    def set_uplink(self, rate_mbit_s: float | None) -> None:
        """Set the rate of the link between each group and the others in both directions; None removes the limit."""
        _check_rate(rate_mbit_s)
        if len(self._groups) > 1:
            for group in range(len(self._groups)):
                _limit(self._switch, f"up{group}", rate_mbit_s, self._packet_bytes)
                _limit(self._switch, f"down{group}", rate_mbit_s, self._packet_bytes)

    def _build(self) -> None:
        for namespace in (self._switch, *(host.namespace for host in self.hosts)):
            _run("ip", "netns", "add", namespace)
        _in(self._switch, "link", "set", "lo", "up")
        several = len(self._groups) > 1
        if several:
            self._add_bridge("core")
        number = 0
        for group, size in enumerate(self._groups):
            bridge = f"group{group}"
            self._add_bridge(bridge)
            if several:
                _in(self._switch, "link", "add", f"up{group}", "type", "veth", "peer", "name", f"down{group}")
                self._plug(f"up{group}", bridge)
                self._plug(f"down{group}", "core")
            for host in self.hosts[number : number + size]:
                self._connect(host, f"port{number}", bridge)
                number += 1
        self.set_rate(self._rate)
        self.set_uplink(self._uplink)

    def _connect(self, host: Host, port: str, bridge: str) -> None:
        host_end = ("link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", self._switch)
        _in(host.namespace, *host_end)
        _in(host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        if self._packet_bytes is not None:
            _in(host.namespace, "link", "set", INTERFACE, "gso_max_size", str(self._packet_bytes))
        _in(host.namespace, "link", "set", "lo", "up")
        _in(host.namespace, "link", "set", INTERFACE, "up")
        # With alternating messages TCP delays acknowledgements; when both sides wait for one, 64 kB
        # each way stall for 70 ms, until a timer expires (docs/lab.md).
        _in(host.namespace, "route", "change", NETWORK, "dev", INTERFACE, "src", host.address, "quickack", "1")
        self._plug(port, bridge)

    def _add_bridge(self, name: str) -> None:
        _in(self._switch, "link", "add", name, "type", "bridge")
        _in(self._switch, "link", "set", name, "up")

    def _plug(self, device: str, bridge: str) -> None:
        _in(self._switch, "link", "set", device, "master", bridge)
        _in(self._switch, "link", "set", device, "up")

    def _remove(self) -> None:
        # A second interrupt must not stop the cleanup halfway.
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
        try:
            _delete([name for name in namespaces() if name.startswith(f"{self._prefix}-")])
        finally:
            if in_main:
                signal.signal(signal.SIGINT, before)
                for number, handler in self._signals.items():
                    signal.signal(number, handler)
                self._signals.clear()


def check_machine() -> None:
    """Raise WhatifError if this machine cannot create hosts."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise WhatifError(f"lab: expected the commands ip and tc, got no {missing[0]}; install iproute2 (Linux only).")
    if os.geteuid() != 0:
        raise WhatifError(
            "lab: expected to be root, since hosts are network namespaces, got another user; run it with sudo. Stored "
            "results need no root: `whatif validate traces/lab_cpu`."
        )


def namespaces() -> list[str]:
    """The namespaces of all labs on this machine, sorted."""
    words = (line.split() for line in _run("ip", "netns", "list").splitlines())
    return sorted(name[0] for name in words if name and _NAME.fullmatch(name[0]))


def clean() -> list[str]:
    """Remove the namespaces of labs whose process was killed; return their names."""
    check_machine()
    left = []
    for name in namespaces():
        found = _NAME.fullmatch(name)
        assert found is not None
        if not Path(f"/proc/{found[1]}").exists():
            left.append(name)
    _delete(left)
    return left


def burst_bytes(rate_mbit_s: float, packet_bytes: int | None = None) -> int:
    """The burst of an idle link of this rate, for packets of at most `packet_bytes` and their headers."""
    if packet_bytes is not None:
        return packet_bytes + HEADER_BYTES
    return max(FEWEST_BURST_BYTES, round(rate_mbit_s * 1e6 / 8 * BURST_S))


def _delete(names: list[str]) -> None:
    """Remove namespaces, after killing their processes: a device exists as long as its namespace has one."""
    for name in names:
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in found.split():
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(pid), signal.SIGKILL)
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _limit(namespace: str, device: str, rate_mbit_s: float | None, packet_bytes: int | None = None) -> None:
    """Limit the rate of a device; None: as fast as it can."""
    if rate_mbit_s is None:
        words = ["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"]
        # Fails if there is no limit to remove.
        subprocess.run(words, capture_output=True, check=False)
        return
    burst = f"{burst_bytes(rate_mbit_s, packet_bytes)}b"
    limit = ("rate", f"{round(rate_mbit_s * 1e6)}bit", "burst", burst, "latency", QUEUE)
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *limit)


def _in(namespace: str, *words: str) -> None:
    _run("ip", "-n", namespace, *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        message = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise WhatifError(f"lab: expected `{' '.join(words)}` to work, got '{message}'; it needs root and iproute2.")
    return done.stdout


def _check_rate(rate_mbit_s: float | None) -> None:
    if rate_mbit_s is not None and not 0.1 <= rate_mbit_s <= 100_000:
        raise WhatifError(f"lab: expected a rate from 0.1 to 100,000 Mbit/s, got {rate_mbit_s:g}.")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
