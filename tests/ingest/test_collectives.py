"""Collectives in a trace besides their kernels: kind, size, and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import call, kernel, names, op, read_events
from whatif import TaskGraph, TaskKind
from whatif.models.exchange.collective_tasks import all_reduces, recorded_workers

GENERIC = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"


def recording(folder: Path, name: str, args: list[dict[str, Any]], **header: Any) -> TaskGraph:
    """One launch and one kernel of that name for each of ``args``."""
    events = [op("aten::mm", 0, 5)]
    for number, more in enumerate(args):
        at = 10.0 + 20 * number
        event = kernel(name, at + 5, 8, number)
        events += [call("cudaLaunchKernel", at, 3, number), {**event, "args": {**event["args"], **more}}]
    return read_events(folder, events, **header)


def arguments(collective: str, elements: int) -> dict[str, Any]:
    return {"Collective name": collective, "In msg nelems": elements, "dtype": "Float", "Group size": 8}


def test_a_kernel_for_all_collectives_is_named_by_its_arguments(tmp_path: Path) -> None:
    graph = recording(
        tmp_path, GENERIC, [arguments("allreduce", 100), arguments("broadcast", 7), {}, arguments("allreduce", 50)]
    )
    sent = graph.kind == TaskKind.COMMUNICATION
    found = [name for name, mine in zip(names(graph), sent.tolist(), strict=True) if mine]
    assert found == [
        "ncclDevKernel_Generic(allreduce)", "ncclDevKernel_Generic(broadcast)", GENERIC,
        "ncclDevKernel_Generic(allreduce)",
    ]  # fmt: skip
    assert graph.size_bytes[sent].tolist() == [400, 28, -1, 200]
    assert graph.size_bytes[all_reduces(graph)].tolist() == [400, 200]


@pytest.mark.parametrize("collective", ["allreduce", "wait", "\x00 nobody knows", ""])
def test_specific_names_stay(tmp_path: Path, collective: str) -> None:
    """An all-to-all runs as a send-receive kernel: the name says what runs. Words that are no collective add none."""
    for name in ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "ncclKernel_AllReduce_RING_LL_Sum"):
        graph = recording(tmp_path, name, [arguments(collective, 1)])
        assert name in names(graph)
    assert collective == "allreduce" or GENERIC in names(recording(tmp_path, GENERIC, [arguments(collective, 1)]))


@pytest.mark.parametrize(
    ("header", "workers"),
    [
        ({"distributedInfo": {"backend": "nccl", "rank": 1, "world_size": 8}}, 8),
        ({"distributedInfo": {"rank": 0}}, None),
        ({"distributedInfo": {"world_size": 1}}, None),  # alone
        ({"distributedInfo": {"world_size": "8"}}, None),
        ({"distributedInfo": {"world_size": True}}, None),
        ({"distributedInfo": {"world_size": -3}}, None),
        ({"distributedInfo": []}, None),
        ({}, None),
    ],
)
def test_the_header_states_how_many_train_together(tmp_path: Path, header: dict[str, Any], workers: int | None) -> None:
    assert recorded_workers(recording(tmp_path, GENERIC, [arguments("allreduce", 1)], **header)) == workers
