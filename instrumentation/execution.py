"""How the recorded steps were executed: by torch.compile, by CUDA graphs, or operator by operator."""

from typing import Any

from torch import nn

_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
_GRAPH_LAUNCH = ("cudaGraphLaunch", "cuGraphLaunch")


def describe_execution(events: list[dict[str, Any]], model: nn.Module) -> dict[str, bool]:
    """Return whether the recorded steps contain compiled regions, and whether they launch CUDA graphs.

    A trace without operators has no compiled regions: a model that was passed to torch.compile counts as well.
    """
    names = {event["name"] for event in events if isinstance(event.get("name"), str)}
    return {
        "compiled": any(name.startswith(_COMPILED) for name in names) or _is_compiled(model),
        "cuda_graph": any(name.startswith(_GRAPH_LAUNCH) for name in names),
    }


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
