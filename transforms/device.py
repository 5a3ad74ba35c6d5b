"""Device: run the recorded step on another GPU.

Source: Tianshu (offline op database); Yu et al., "Habitat", USENIX ATC 2021 (wave scaling); Williams et al.,
        "Roofline", CACM 2009.
Model:  each kernel takes its recorded time times the ratio of two estimates of one source, one for each device: from
        the op database, from models of measurements, else from the data sheets
        (whatif/models/durations/other_device.py). Convolutions in fp32 run in TF32 if the new device has it and the
        recorded one did not (`tf32=no`: not), as PyTorch does by default. The CPU takes 1 / `cpu` of its time.
        Collectives stay, and so do copies from pageable memory; later what-ifs use the new device's usual node and
        network (whatif/hardware), unless they name another, or the device is the recorded one. Ignored: another kernel
        choice in the same format, larger caches, throttled clocks.
Effort: medium: another machine.
"""

from typing import Literal

import numpy as np

from whatif import Change, TaskGraph, WhatifError
from whatif.hardware.gpu import gpu_asked_for
from whatif.models.durations.estimator import device, put, sources
from whatif.models.durations.other_device import notes_of, on_device, with_facts_of

PLACE = "device"


def transform(
    graph: TaskGraph, *, to: str | None = None, cpu: float = 1.0, tf32: Literal["auto", "no"] = "auto"
) -> TaskGraph:
    """Set every GPU task to its time on the device `to`."""
    if to is None:
        raise WhatifError(
            "device: expected device:to=NAME, as in device:to=A100-SXM-80; `whatif recommend` tries them all."
        )
    new = gpu_asked_for(to)
    if not 0 < cpu < 1e6:
        raise WhatifError(f"device: expected a speedup of the CPU above 0 and below a million, got {cpu}.")
    if not graph.has_gpu:
        raise WhatifError("device: expected the recording of a GPU, got one of a CPU; `whatif predict` starts without.")
    if cpu != 1:
        graph = graph.scale(graph.on_cpu, 1 / cpu)
    old = device(graph)
    if old is not None and old.name == new.name:
        sentence = f"device: the recording is of a {new.name} already; no kernel changes"
        return graph.note(sentence) if cpu != 1 else graph.unchanged(sentence)
    if Change.ON_ANOTHER_DEVICE in graph.info.changes:
        raise WhatifError(f"device: expected the recorded step, got one on {graph.info.gpu} already; name one device.")
    tasks = np.flatnonzero(graph.gpu_work).astype(np.int64)
    estimates = on_device(graph, tasks, new, tf32=tf32 == "auto")
    for note in notes_of(graph, tasks, estimates, new):
        graph = graph.note(note)
    if sources(graph).any():
        graph = graph.note(
            f"device: the what-ifs before it estimated times on the recorded device; name device first to do so on "
            f"{new.name}"
        )
    if new.note_on_dies:
        graph = graph.note(f"device: {new.note_on_dies}; use to={new.name}-GCD")
    peak_bytes = graph.info.peak_bytes
    if peak_bytes is not None and peak_bytes > new.memory_bytes:
        graph = graph.note(
            f"device: the step does not fit: it needs {peak_bytes / 2**30:.1f} GiB at its peak, and "
            f"{new.name} has {new.memory_gibyte:g}; `whatif memory` shows what would fit"
        )
    changed = with_facts_of(put(graph, tasks, estimates), new, tf32=tf32 == "auto")
    return changed.with_change(Change.ON_ANOTHER_DEVICE)
