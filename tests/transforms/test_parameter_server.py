"""``parameter_server`` on steps drawn by hand, with exact nanoseconds, and as properties.

Its channels take what is ready first; gradients are 400,000 bytes each, at 1 GB/s 400,000 ns.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import apply, with_metadata
from tests.transforms.communication_graphs import SLICED, drawn, kept_order, on_cpu, rows, training, two_layers
from whatif import Phase, TaskGraph, TaskKind, WhatifError, simulate
from whatif.graph.types import Change

pytestmark = pytest.mark.usefixtures("round_v100", "equal_gpus")

ALONE = "parameter_server:workers=2,servers=1,bandwidth=1GB/s,latency_us=0"
# Between host and GPU: 15.75 GB/s of PCIe 3.0, 0.8 of it, for a V100.
COPY_NS = round(400_000 / (15.75 * 0.8))
# A server's CPU reads two gradients, writes their sum, and updates (two accesses), at a third of a copy's 10 GB/s each.


def test_parameter_server_by_hand() -> None:
    """One server for two workers: each of its links carries both, so a gradient takes 800,000.

    ::

        stream  b2|b1|                                                                   |f1|f2|
        to host    |2|1|
        send         |push 2-------------|push 1-------------|
        server                           |2|                 |1|
        receive                             |pull 2-------------|pull 1-------------|
        to GPU                                                  |2|                 |1|
    """
    graph = apply(two_layers(2, **SLICED), ALONE)
    timeline = simulate(graph)
    parts = {
        thread.name: drawn(timeline, thread.name)[:2]
        for thread in graph.threads[2:]
    }  # fmt: skip
    names = ["network, send", "network, receive", "parameter server, CPU",
             "Memcpy DtoH (gradients, what-if)", "Memcpy HtoD (weights, what-if)"]  # fmt: skip
    assert list(parts) == names
    send, receive, server, out, back = (parts[name] for name in names)
    assert [end - begin for _, begin, end in out + back] == [COPY_NS] * 4
    assert [end - begin for _, begin, end in send + receive] == [800_000] * 4
    # Each waits for the one before: what is pushed for its copy, what is reduced for its push, and so on.
    assert send[0][1] == out[0][2]
    assert send[1][1] == send[0][2]
    for number in (0, 1):
        assert server[number][1] == send[number][2]
        assert receive[number][1] == max(server[number][2], receive[number - 1][2] if number else 0)
        assert back[number][1] == receive[number][2]
    # Layer 1 is used first and its gradient comes last: the next step begins when its weights are there.
    f1 = [start for name, start, _ in drawn(timeline, "stream 7") if name == "f1"]
    assert f1[1] == back[1][2]
    assert not graph.select(name="^u$").any()
    assert graph.info.workers == 2


def test_gpus_share_the_link_to_their_host() -> None:
    """Pei et al. §III D: with link_num GPUs on a link a copy takes link_num times as long."""
    four = apply(two_layers(2, **SLICED), f"{ALONE},gpus_per_link=4")
    copies = four.duration_ns[four.select(name="^Memcpy")]
    assert copies.tolist() == pytest.approx([4 * COPY_NS] * 8, abs=3)


def test_a_server_adds_up_what_all_workers_push() -> None:
    """(workers + 1 + 2) accesses at a third of the copy rate: of 400,000 bytes at 2,400 bytes/ns 278 and 389 ns."""
    graph = with_metadata(on_cpu(2), grad_ready_order=rows(400_000, 400_000))
    for workers, expected in ((2, 278), (4, 389)):
        changed = apply(graph, ALONE.replace("workers=2", f"workers={workers}"))
        assert changed.duration_ns[changed.select(name="^reduce and update$")].tolist() == [expected] * 4
        assert not changed.on_gpu.any()
        assert not changed.select(name="Memcpy").any()


def test_sockets_take_their_time_from_the_core() -> None:
    """Eight copies of what passes either way, where a gradient is done; with a server of one's own 2 (n - 1) / n."""
    graph = with_metadata(on_cpu(2), grad_ready_order=rows(2_400_000, 2_400_000))
    changed = apply(graph, ALONE)
    assert changed.duration_ns[changed.select(name="^sending and receiving$")].tolist() == [8_000] * 4
    assert drawn(simulate(changed), "CPU")[2:5] == [
        ("b2", 20_000, 40_000), ("sending and receiving", 40_000, 48_000), ("b1", 48_000, 68_000)
    ]  # fmt: skip
    beside = apply(graph, ALONE.replace("workers=2,servers=1", "workers=4,servers=0"))
    assert beside.duration_ns[beside.select(name="^sending and receiving$")].tolist() == [12_000] * 4


def test_beside_each_worker_a_server() -> None:
    """servers=0: as much over each link as in a ring, 2 (n - 1) / n of the gradients either way."""
    graph = apply(two_layers(2, grad_ready_order=rows(8_000_000, 8_000_000)),
                  "parameter_server:workers=4,servers=0,bandwidth=1GB/s,latency_us=0")  # fmt: skip
    for channel in ("network, send", "network, receive"):
        code = next(code for code, thread in enumerate(graph.threads) if thread.name == channel)
        carried = graph.duration_ns[(graph.thread == code) & (graph.step == 0)].sum()
        assert carried == 2 * 3 / 4 * 16_000_000


def test_stale_weights_hold_nobody_up_for_a_step() -> None:
    """sync=false: the second step begins without its weights, the third waits for the first one's."""
    graph = two_layers(3, **SLICED)
    sync, stale = (simulate(apply(graph, f"{ALONE},sync={flag}")) for flag in ("true", "false"))
    begins = [[start for name, start, _ in drawn(t, "stream 7") if name == "f1"] for t in (sync, stale)]
    assert begins[1][1] < begins[0][1]
    assert begins[1][2] <= begins[0][2]
    first_back = drawn(stale, "Memcpy HtoD (weights, what-if)")[1][2]
    assert begins[1][2] >= first_back


def test_bandwidth_shortens_what_is_sent_and_not_what_is_computed() -> None:
    graph = two_layers(2, **SLICED)
    after, at_once = apply(graph, ALONE, "bandwidth"), apply(graph, ALONE.replace("=1GB/s", "=2GB/s"))
    np.testing.assert_allclose(after.duration_ns, at_once.duration_ns, atol=1)


@settings(max_examples=40, deadline=None)
@given(training(), st.sampled_from([0, 1, 3]), st.booleans())
def test_it_keeps_the_step_and_gains_with_bandwidth(graph: TaskGraph, servers: int, sync: bool) -> None:
    spec = f"parameter_server:workers=3,servers={servers},sync={sync},bandwidth="
    slow, fast = (apply(graph, f"{spec}{link}") for link in ("1Gbps", "4Gbps"))
    kept_order(graph, slow)
    # A link that is free sooner may begin with another transfer: at most that one is lost.
    largest = int(slow.duration_ns[slow.kind == TaskKind.COMMUNICATION].max())
    assert simulate(fast).makespan_ns <= simulate(slow).makespan_ns + largest
    assert not (slow.kind == TaskKind.COMMUNICATION)[slow.phase == Phase.FORWARD].any()


@pytest.mark.parametrize(
    "options", ["workers=1", "workers=0", "servers=-1", "gpus_per_link=0", "bandwidth=3", "latency_us=-1",
                "cluster=nowhere", "table=nowhere.csv", "gradient_mb=0"],
)  # fmt: skip
def test_options_that_make_no_sense_are_one_sentence(options: str) -> None:
    with pytest.raises(WhatifError) as error:
        apply(two_layers(2), f"parameter_server:{options}")
    assert "\n" not in str(error.value)


def test_where_it_does_not_apply() -> None:
    once = apply(two_layers(2), "distributed:workers=2")
    stages = two_layers(2).with_change(Change.IN_STAGES)
    for name in ("parameter_server", "p3"):
        with pytest.raises(WhatifError, match=f"{name}: expected steps that exchange no gradients yet"):
            apply(once, name)
        with pytest.raises(WhatifError, match=f"{name}: expected steps of a whole model, got a pipeline's stages"):
            apply(stages, name)
