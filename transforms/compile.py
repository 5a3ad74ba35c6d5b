"""torch.compile: fuse the kernels between matrix products, and launch the rest from generated code.

Source: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
        Compilation", ASPLOS 2024, §4 and §6 (Dynamo, AOTAutograd and Inductor).
Model:  in the forward and the backward pass chains of element-wise kernels, casts, reductions and normalizations become
        one kernel each, with one reduction at most (maximum and sum of a softmax are one): it takes the time of the
        longest and a quarter of the others' (none to half; half on a CPU), because values between them stay in
        registers. The others' launches are removed, and the CPU's work per remaining launch takes at most 5 us (2 to
        10); entering a region costs 40 us and 1 us per layer for guards. A read of a tensor's values (a wait for the
        GPU; on a CPU .item() and masks as an index) breaks the region in two. Products, convolutions, attention,
        look-ups, collectives, copies and the update stay, and so do nn.RNN, nn.LSTM and nn.GRU (Dynamo breaks the graph
        there) and start-up work (calls of over 1 ms, in steps that are mostly such). On a CPU Inductor puts a model
        with convolutions into channels-last (torch's `_inductor/graph.py`, `decide_layout_opt`), with the effect that
        `channels_last` predicts; on a GPU that depends on its channels, and only the range of `channels_last compile`
        covers it. On a CPU the generated loops are slow at masks for the backward pass (`stored_masks.py`): of a ReLU
        before maximum pooling, a leaky ReLU, dropout; normalizations next to convolutions may take 0.4 to 1.7 times as
        long (a MobileNet was predicted at 0.68 of the step, and took 0.82 to 0.90). `mode=reduce-overhead` puts each
        region into a CUDA graph as well; a step that a graph launches already enters no region. Ignored: the time to
        compile, templates that Inductor tunes for products, recomputation that it chooses, and memory.
Effort: small: torch.compile(model), on a GPU with mode="reduce-overhead" for CUDA graphs. Graph breaks cost some gain.
"""

from typing import Literal

from whatif import Phase, TaskGraph, WhatifError
from whatif.models import KernelFamily, capture, not_modelled, note_start_up
from whatif.models.kernels.channels_last import in_channels_last, is_in_channels_last
from whatif.models.kernels.fusion import PASSES, add_regions, fuse

PLACE = "compiler"


def transform(graph: TaskGraph, *, mode: Literal["default", "reduce-overhead"] = "default") -> TaskGraph:
    """Fuse the kernels of both passes, and with mode=reduce-overhead launch each pass as a CUDA graph."""
    if not graph.select(phase=Phase.FORWARD).any():
        raise WhatifError(
            f"compile: expected a recording with its forward pass, got {graph.info.path or 'one'} without "
            "operators; record with the profiler's CPU activity."
        )
    graph.info.expect_steps("compile")
    graphs = mode == "reduce-overhead" and "cuda_graph" not in graph.info.execution
    if graphs and not graph.has_gpu:
        raise WhatifError("compile: expected mode=default for a recording of a CPU, which has no CUDA graphs.")
    if "compiled" in graph.info.execution:
        graph = graph.note("compile: torch.compile runs the recorded step already; no kernel changes")
        changed, _ = capture(graph, PASSES, apart=True) if graphs else (graph, None)
        return graph if changed is graph else add_regions(changed, graph_trees=True)
    convolutions = graph.family == KernelFamily.CONVOLUTION
    if convolutions.any() and not graph.has_gpu and not is_in_channels_last(graph):
        graph = in_channels_last(graph, "compile")
    changed, fused = fuse(graph)
    if not fused.before:
        return graph.unchanged("compile: the recorded passes hold nothing that it compiles; nothing changes")
    steps = max(fused.steps, 1)
    passes = "both passes" if (graph.phase == Phase.BACKWARD).any() else "the forward pass"
    regions = fused.regions / steps
    changed = changed.note(
        f"compile: {fused.before / steps:.0f} {'kernels' if graph.has_gpu else 'operators'} of {passes} become "
        f"{fused.after / steps:.0f}, in {regions:.3g} region{'' if regions == 1 else 's'}"
    )
    changed = not_modelled(note_start_up(changed, "compile", fused.start_up_ns), "compile")
    if "cuda_graph" in graph.info.execution:
        return changed.note("compile: CUDA graphs launch the kernels already, so that no compiled region is entered")
    if graphs:
        changed, _ = capture(changed, PASSES, apart=True)
    return add_regions(changed, graph_trees=graphs)
