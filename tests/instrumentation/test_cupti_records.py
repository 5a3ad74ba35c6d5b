"""Real CUPTI record objects become plain rows, and CUPTI's numbers Kineto's words."""

from __future__ import annotations

from typing import Any

import pytest
from whatif.instrumentation.cupti.names import api_name, copy_name, demangle, memset_name, overhead_name, sync_name
from whatif.instrumentation.cupti.records import CallRow, CopyRow, EventRow, KernelRow, OverheadRow, Records, SyncRow

from tests.instrumentation import cupti_machine as machine
from tests.instrumentation.cupti_machine import KIND, cupti

MEMORY, COPY = cupti.ActivityMemoryKind, cupti.ActivityMemcpyKind


def rows(*records: Any) -> Records:
    found = Records(cupti)
    found.add(records)
    return found


def test_a_kernel_keeps_its_place_and_its_size() -> None:
    record = machine.kernel(
        "_Z4axpyf", 1_000, 1_250, 42, stream=13, grid_x=3, grid_y=2, grid_z=1, block_x=128, block_y=1, block_z=1,
        registers_per_thread=32, static_shared_memory=100, dynamic_shared_memory=28, graph_node_id=5,
    )  # fmt: skip
    assert rows(record).kernels == [
        KernelRow("_Z4axpyf", 1_000, 1_250, 0, machine.CONTEXT, 13, 42, (3, 2, 1), (128, 1, 1), 32, 128, 5)
    ]


@pytest.mark.parametrize(
    ("kind", "source", "target", "name"),
    [
        (COPY.HTOD, MEMORY.PAGEABLE, MEMORY.DEVICE, "Memcpy HtoD (Pageable -> Device)"),
        (COPY.HTOD, MEMORY.PINNED, MEMORY.DEVICE, "Memcpy HtoD (Pinned -> Device)"),
        (COPY.DTOH, MEMORY.DEVICE, MEMORY.PAGEABLE, "Memcpy DtoH (Device -> Pageable)"),
        (COPY.DTOD, MEMORY.DEVICE, MEMORY.DEVICE_STATIC, "Memcpy DtoD (Device -> Device Static)"),
        (COPY.PTOP, MEMORY.DEVICE, MEMORY.DEVICE, "Memcpy PtoP (Device -> Device)"),
        (COPY.ATOH, MEMORY.ARRAY, MEMORY.MANAGED, "Memcpy AtoH (Array -> Managed)"),
    ],
)
def test_a_copy_says_from_where_to_where(kind: Any, source: Any, target: Any, name: str) -> None:
    found = rows(machine.memcpy(kind, source, target, 10, 20, 6, 99))
    assert found.copies == [CopyRow(False, name, 10, 20, 0, machine.CONTEXT, machine.STREAM, 6, 99)]


def test_every_copy_kind_has_its_word() -> None:
    named = {member.name for member in COPY} - {"UNKNOWN", "FORCE_INT"}
    assert "Unknown" not in " ".join(copy_name(name, "DEVICE", "DEVICE") for name in named)
    assert copy_name("UNKNOWN", "UNKNOWN", "DEVICE") == "Memcpy Unknown (Unknown -> Device)"


def test_a_number_that_no_enumeration_knows_costs_no_record() -> None:
    record = machine.memcpy(200, 200, 200, 10, 20, 6, 99)
    assert rows(record).copies[0].name == "Memcpy Unknown (Unknown -> Unknown)"


def test_peer_copies_are_copies() -> None:
    record = machine.fill(
        cupti.ActivityMemcpyPtoP4(), kind=int(KIND.MEMCPY2), copy_kind=int(COPY.PTOP), src_kind=int(MEMORY.DEVICE),
        dst_kind=int(MEMORY.DEVICE), bytes=7, start=1, end=2, stream_id=3, correlation_id=4,
    )  # fmt: skip
    assert rows(record).copies == [CopyRow(False, "Memcpy PtoP (Device -> Device)", 1, 2, 0, 0, 3, 4, 7)]


def test_a_memset_moves_bytes() -> None:
    assert rows(machine.memset(10, 20, 9, 4)).copies == [
        CopyRow(True, "Memset (Device)", 10, 20, 0, machine.CONTEXT, machine.STREAM, 9, 4)
    ]
    assert memset_name("MANAGED_STATIC") == "Memset (Managed Static)"


def test_calls_of_both_interfaces() -> None:
    found = rows(machine.call(211, 1, 5, 7, thread=99), machine.call(307, 2, 4, 8, driver=True))
    assert found.calls == [CallRow(False, 211, 1, 5, 1, 99, 7), CallRow(True, 307, 2, 4, 1, 1, 8)]


@pytest.mark.parametrize(
    ("callback", "name"),
    [
        ("cudaLaunchKernel_v7000", "cudaLaunchKernel"),
        ("cudaLaunchKernelExC_v11060", "cudaLaunchKernelExC"),
        ("cudaMemcpyAsync_ptsz_v7000", "cudaMemcpyAsync_ptsz"),
        ("cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync_v2"),
        ("cuLaunchKernel", "cuLaunchKernel"),
    ],
)
def test_an_api_loses_its_version_only(callback: str, name: str) -> None:
    assert api_name(callback) == name


def test_no_runtime_call_keeps_a_version() -> None:
    """All 500 and more names that the binding knows."""
    names = [member.name for member in machine.RUNTIME if member.name.startswith("cuda")]
    assert len(names) > 400
    assert not [name for name in map(api_name, names) if name[-4:].isdigit()]


def test_a_synchronisation_without_stream_or_event_has_neither() -> None:
    kind = cupti.ActivitySynchronizationType
    found = rows(
        machine.sync(kind.STREAM_WAIT_EVENT, 1, 2, 3, stream=20, event=5),
        machine.sync(kind.CONTEXT_SYNCHRONIZE, 4, 9, 6, stream=machine.NO_STREAM),
    )
    assert found.syncs == [
        SyncRow("Stream Wait Event", 1, 2, machine.CONTEXT, 20, 5, 3),
        SyncRow("Context Sync", 4, 9, machine.CONTEXT, -1, -1, 6),
    ]


def test_every_kind_of_synchronisation_has_its_word() -> None:
    named = [member.name for member in cupti.ActivitySynchronizationType if member.name not in ("UNKNOWN", "FORCE_INT")]
    assert {sync_name(name) for name in named} == {"Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync"}
    assert sync_name("UNKNOWN") == "Unknown Sync"


def test_recordings_of_events_name_their_stream() -> None:
    assert rows(machine.event_record(5, 12, stream=20)).events == [EventRow(machine.CONTEXT, 5, 20, 12)]


def test_overhead_says_whose_it_is() -> None:
    kind = cupti.ActivityOverheadKind
    assert rows(machine.overhead(kind.CUPTI_INSTRUMENTATION, 1, 2)).overheads == [OverheadRow("Instrumentation", 1, 2)]
    words = {overhead_name(member.name) for member in kind if member.name != "FORCE_INT"}
    assert {"Buffer Flush", "Resource", "Driver Compiler", "Lazy Function Loading", "Command Buffer Full"} <= words


def test_external_ids_of_other_tools_are_theirs() -> None:
    other = cupti.ExternalCorrelationKind.CUSTOM1
    assert rows(machine.external(5, 77), machine.external(6, 78, other)).external_ids == {5: 77}


def test_records_of_other_kinds_are_left_out() -> None:
    device = machine.fill(cupti.ActivityDevice6(), kind=int(KIND.DEVICE))
    found = rows(device, device, machine.memset(10, 20, 9, 4))
    assert len(found.copies) == 1


def test_symbols_read_as_the_source_spells_them() -> None:
    symbol = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEEEEviT0_"
    assert demangle(symbol) == (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >"
        "(int, at::native::FillFunctor<float>)"
    )
    assert demangle("_Zno_symbol") == "_Zno_symbol"
    assert demangle("ampere_sgemm_128x64_nn") == "ampere_sgemm_128x64_nn"
