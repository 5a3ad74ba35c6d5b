"""Which what-ifs lead from one run to another: from their options to the names that ``whatif apply`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Options = Mapping[str, Any]

# The optimizer's implementations from the slowest on: a what-if leads to a later one only.
IMPLEMENTATIONS = ("for", "foreach", "fused")
FUSED_ADAM = {"foreach": "fused_adam:to=foreach", "fused": "fused_adam"}
# What-ifs that lead from eager execution to another mode.
EXECUTIONS = {
    "cuda_graph": "cuda_graph",
    "compile": "compile",
    "compile with CUDA graphs": "compile:mode=reduce-overhead",
}


def _implementation(before: Any, after: Any) -> str | None:
    if before not in IMPLEMENTATIONS or after not in IMPLEMENTATIONS:
        return None
    return FUSED_ADAM[after] if IMPLEMENTATIONS.index(after) > IMPLEMENTATIONS.index(before) else None


def _checkpoint(_before: Any, after: Any) -> str | None:
    if isinstance(after, str) and after:  # the layers, if the record names them
        return f"activation_checkpoint:layers={after}"
    return "activation_checkpoint" if after else None


# The what-if of each option that may change, in the order in which they are applied.
WHAT_IFS: Mapping[str, Callable[[Any, Any], str | None]] = {
    "batch_factor": lambda old, new: f"batch_size:factor={new / old:g}" if old > 0 and new > 0 else None,
    "channels_last": lambda _, new: "channels_last" if new else None,
    "precision": lambda old, new: "tf32" if old in ("ieee", "default") and new == "tf32" else None,
    "amp": lambda old, new: f"amp:target={new}" if not old and new in ("fp16", "bf16") else None,
    # Which fused kernel there is follows from the precision.
    "attention": lambda old, new: "flash_attention" if (old, new) == ("math", "") else None,
    "implementation": _implementation,
    "bn_eval": lambda _, new: "batch_norm_eval" if new else None,
    "checkpoint": _checkpoint,
    "accumulate": lambda old, new: f"gradient_accumulation:passes={new}" if old == 1 and new > 1 else None,
    "loader_workers": lambda old, new: f"data_loading:workers={new}" if old == 0 and new > 0 else None,
    # torch's save_on_cpu ("sync") copies every saved tensor and waits: no what-if does that.
    "offload": lambda old, new: "vdnn:layers=all,sync=false" if (old, new) == ("", "stream") else None,
    "update_in_backward": lambda _, new: "optimizer_in_backward" if new else None,
    # Applied last: fusion and capture are of the step that all the others have changed.
    "execution": lambda old, new: EXECUTIONS.get(new) if old == "eager" else None,
}


def changed_options(before: Options, after: Options) -> list[str]:
    """Name the options in which two runs differ."""
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def what_ifs_between(before: Options, after: Options) -> tuple[tuple[str, ...], list[str]]:
    """Return the what-ifs that lead from one run to the other, and the changes that none of them represents."""
    changed = changed_options(before, after)
    found: dict[str, str] = {}
    missing = []
    for option in changed:
        if option == "capturable" and after.get(option) and after.get("execution") == "cuda_graph":
            continue  # the what-if of the graph makes Adam capturable
        rule = WHAT_IFS.get(option)
        try:
            what_if = rule(before.get(option), after.get(option)) if rule else None
        except TypeError:  # a value of a kind that the option does not take
            what_if = None
        if what_if is None:
            missing.append(f"{option} {_shown(before.get(option))} → {_shown(after.get(option))}")
        else:
            found[option] = what_if
    return tuple(found[option] for option in WHAT_IFS if option in found), missing


def is_plain(options: Options, defaults: Options) -> bool:
    """Whether a run changes nothing but its optimizer, so that it can be the baseline of others.

    Loading in the training process is the baseline of loader workers, unfused attention that of fused attention, and
    torch's default use of TF32 that of runs with another change.
    """
    free = ("optimizer", "implementation", "capturable")
    changed = {key: options[key] for key in changed_options(defaults, options) if key not in free}
    return changed in ({}, {"loader_workers": 0}, {"attention": "math"}, {"precision": "default"})


def _shown(value: Any) -> str:
    return str(value).lower() if value not in ("", None) else "none"
