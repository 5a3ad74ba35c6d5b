"""CUDA graphs: launch a whole step, or its forward and backward pass, with one call.

Source: PyTorch, "Accelerating PyTorch with CUDA Graphs" (2021); NVIDIA, "Getting Started with CUDA Graphs" (2019) and
        "Constant Time Launch for Straight-Line CUDA Graphs" (2024).
Model:  the launches of a step and the CPU's work between them become one call that takes 10 us and 100 ns a node (2.5
        us and 1 ns to 20 us and 200 ns). Kernels and their order stay, with a graph's gap between them
        (whatif/hardware/architectures.toml: 0.3 us on Hopper, 0.5 on others of NVIDIA's): the gain is the GPU's wait
        for the CPU. Data loading and the copy of the batch stay outside. At a wait of the CPU for the GPU (loss.item(),
        a GradScaler, a blocking copy) the graph ends and another one begins; the prediction states how often.
        `capture=passes` excludes the update. Each step has to launch the same kernels with the same shapes; if recorded
        steps do not, a note says so. Start-up work (calls of over 1 ms, in steps that are mostly such) stays and splits
        the graph as a wait does. A captured Adam needs capturable=True: a for-loop one gets 12 more one-element kernels
        per tensor (torch/optim/adam.py). Ignored: memory of the graph's own pool.
Effort: medium: torch.cuda.graph or make_graphed_callables, with static shapes and buffers and no waits.
"""

from typing import Literal

from whatif import Phase, TaskGraph, WhatifError
from whatif.models import capture as captured_in_graphs
from whatif.models import not_modelled, note_start_up

PLACE = "launches"

PASSES = (Phase.UNKNOWN, Phase.FORWARD, Phase.BACKWARD)


def transform(graph: TaskGraph, *, capture: Literal["step", "passes"] = "step") -> TaskGraph:
    """Replace the launches of each step by one launch of a graph, or by one between two waits of the CPU."""
    if not graph.has_gpu:
        raise WhatifError(
            f"cuda_graph: expected a recording of GPU work, got {graph.info.path or 'one'} of a CPU, which launches "
            "nothing; record the run on a GPU."
        )
    graph.info.expect_steps("cuda_graph")
    phases = PASSES if capture == "passes" else (*PASSES, Phase.UPDATE)
    changed, found = captured_in_graphs(graph, phases)
    if changed is graph:
        return graph.unchanged("cuda_graph: no step has two launches or more that a graph could take; nothing changes")
    splits = (found.launches - found.steps) / found.steps
    cause = "waits for the GPU or starts something up" if found.start_up_ns else "waits for the GPU"
    changed = changed.note(
        f"cuda_graph: {found.calls / found.steps:.0f} launches a step become {found.launches / found.steps:.3g}"
        + (f", because the CPU {cause} in between ({splits:.3g} splits)" if splits else "")
    )
    changed = not_modelled(note_start_up(changed, "cuda_graph", found.start_up_ns), "cuda_graph")
    if found.uneven:
        changed = changed.note(
            "cuda_graph: the recorded steps do not all launch equally many tasks (dynamic shapes or control flow), so "
            "each kind of step needs a graph of its own"
        )
    return changed
