"""Hosts come and go, links are as slow as they are said to be: really, so as root and on Linux only."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from whatif.runtime.errors import WhatifError

need("torch")
hosts = need("benchmarks.lab.hosts")
job = need("benchmarks.lab.job")
network_first = need("benchmarks.lab.network_first")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.name != "posix" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")),
        reason="network namespaces need root, ip and tc",
    ),
]

WAITING = """
import sys, time
from benchmarks.lab.hosts import Hosts
with Hosts((1, 1), rate_mbit_s=10, uplink_mbit_s=5):
    print("ready", flush=True)
    time.sleep(60)
"""


def own(pid: int) -> list[str]:
    return [name for name in hosts.namespaces() if name.startswith(f"{hosts.PREFIX}-{pid}-")]


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[str]]:
    """A process that has hosts and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], cwd=job.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()
    hosts.clean()


def test_hosts_are_there_within_the_block_and_gone_behind_it() -> None:
    with hosts.Hosts((2, 1), rate_mbit_s=50, uplink_mbit_s=20) as network:
        assert len(network.hosts) == 3
        assert len(own(os.getpid())) == 4  # and the switch
        qdiscs = subprocess.run(
            network.hosts[2].command("tc", "qdisc", "show", "dev", hosts.INTERFACE), capture_output=True, text=True
        ).stdout
        assert "tbf" in qdiscs
        assert "rate 50Mbit" in qdiscs
        network.set_rate(None)
        qdiscs = subprocess.run(
            network.hosts[2].command("tc", "qdisc", "show", "dev", hosts.INTERFACE), capture_output=True, text=True
        ).stdout
        assert "tbf" not in qdiscs
        with pytest.raises(WhatifError, match="one set of hosts at a time"), hosts.Hosts():
            pass
        assert len(own(os.getpid())) == 4
    assert not own(os.getpid())


def test_an_exception_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), hosts.Hosts():
        print(1 / 0)
    assert not own(os.getpid())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(waiting: Any, number: int) -> None:
    assert len(own(waiting.pid)) == 3
    waiting.send_signal(number)
    waiting.communicate(timeout=20)
    assert waiting.returncode != 0
    assert not own(waiting.pid)


def test_clean_removes_what_a_killed_lab_left_and_nothing_else(waiting: Any) -> None:
    with hosts.Hosts((1,)):
        waiting.kill()
        waiting.communicate()
        assert len(own(waiting.pid)) == 3
        removed = hosts.clean()
        assert {name.split("-")[2] for name in removed} >= {str(waiting.pid)}
        assert not own(waiting.pid)
        assert len(own(os.getpid())) == 2


def test_a_worker_that_fails_ends_the_job_with_its_last_line(tmp_path: Path) -> None:
    with hosts.Hosts((2,)) as network:
        workers = job.spread(network.hosts, "whatif.no_such_module", {})
        with pytest.raises(WhatifError, match=r"worker \d with exit status 1: .*No module named whatif.no_such_module"):
            job.run_job(workers, timeout_s=30)
        workers = [job.Worker(host, "http.server", {}, 0) for host in network.hosts]
        # A request is no port: this one runs for ever if it starts at all, or fails; either way nothing stays.
        with pytest.raises(WhatifError, match=r"lab: expected"):
            job.run_job(workers, timeout_s=2)
        left = subprocess.run(["ip", "netns", "pids", network.hosts[0].namespace], capture_output=True, text=True)
        assert not left.stdout.strip()


def test_the_kernels_network_comes_first_and_is_as_before_afterwards() -> None:
    threads = network_first._deferred_work()
    assert threads
    with network_first.network_first():
        assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_FIFO}
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_OTHER}


def all_reduces(rate_mbit_s: float) -> list[dict[str, Any]]:
    with hosts.Hosts((2,), rate_mbit_s=rate_mbit_s) as network:
        request = {"sizes_bytes": [1 << 20]}
        found = job.run_job(job.spread(network.hosts, "benchmarks.lab.collectives", request), timeout_s=60)
    assert not own(os.getpid())
    return list(found)


def test_an_all_reduce_takes_what_its_link_needs() -> None:
    """Two workers send a whole buffer each: bytes over 0.95 of the rate; a quarter of the rate takes four times."""
    slow, fast = (statistics.median(all_reduces(rate)[0]["times_ms"][str(1 << 20)]) for rate in (40.0, 160.0))
    expected_ms = (1 << 20) * 8 / (0.95 * 40e3)
    assert 0.7 * expected_ms < slow < 3 * expected_ms
    assert 2.4 < slow / fast < 6.5


def test_ddp_trains_over_a_slow_link() -> None:
    """A real step over 100 Mbit/s: it takes at least the link's time, and less than twice step and link together."""
    request = {"model": "bert", "rounds": 2, "ways": [{"name": "one", "bucket_mb": 1000, "hook": ""}]}
    with hosts.Hosts((2,), rate_mbit_s=100) as network:
        first, second = job.run_job(job.spread(network.hosts, "benchmarks.lab.ddp", request), timeout_s=120)
    assert first["bucket_bytes"]["one"] == [first["gradient_bytes"]]
    link_ms = first["gradient_bytes"] * 8 / 100e3
    steps = [ms for row in first["rounds"]["one"] for ms in row["samples_ms"][0]]
    plain = [ms for row in second["rounds"]["local"] for ms in row["samples_ms"][0]]
    assert statistics.median(first["alone_ms"]["one"]) > 0.9 * link_ms
    assert link_ms < statistics.median(steps) < 2 * (1.05 * link_ms + statistics.median(plain))
