"""What limits a step, in one sentence with its numbers."""

from __future__ import annotations

from whatif.prediction.predict import Baseline
from whatif.simulation.breakdown import Breakdown
from whatif.simulation.steps import CLOCK_NOUNS

# Data loading and communication are named from a quarter of the critical path on, even if other work takes more:
# their remedies are known and cheap, and removing a quarter is a speed-up of 1.3x.
NAMED_FROM = 0.25
# From a tenth of it on they are mentioned after the main bound.
MENTIONED_FROM = 0.1
# If the GPU is busy for this share, a faster CPU saves no more than the rest, whatever the critical path.
ALWAYS_BUSY = 0.95

GPU_WORK = ("kernel", "memcpy", "memset")
HOST_WORK = ("cpu_op", "runtime", "gap")


def verdict(
    baseline: Baseline,
    critical_path_ms: dict[str, float],
    phase_cpu_ms: dict[str, float],
    family_gpu_ms: dict[str, float] | None = None,
    peers_ms: float = 0.0,
    held_up: tuple[int, float] | None = None,
) -> str:
    """Return the sentence: loading-, peer-, communication-, GPU-, host- or CPU-bound, or waiting for an unknown cause.

    The times are ms of the step: on the critical path by task kind, on the CPU by phase, on the GPU by kernel family;
    ``peers_ms`` of the communication on the critical path waits for other ranks. ``held_up``: the rank for which the
    others wait, and how long, ms, if the recordings of several ranks are available.
    """
    step_ms, noun = baseline.step_ms, CLOCK_NOUNS[baseline.clock]
    if step_ms <= 0:
        return "no step to explain: the recording holds no work that takes time."
    parts = baseline.breakdown
    on_path = {
        "gpu": sum(critical_path_ms.get(kind, 0.0) for kind in GPU_WORK),
        "host": sum(critical_path_ms.get(kind, 0.0) for kind in HOST_WORK),
        "wait": critical_path_ms.get("wait", 0.0),
    }
    loading_ms = critical_path_ms.get("data_loading", 0.0)
    largest = max(on_path, key=lambda key: on_path[key])
    if on_path["wait"] >= NAMED_FROM * step_ms and largest == "wait":
        return (
            f"waiting: the {noun} is idle for {_of(on_path['wait'], step_ms)}, and the recording does not show "
            "why (another process, another rank, a part that was not recorded)."
        )
    if loading_ms >= NAMED_FROM * step_ms:
        return (
            f"loading-bound: the {noun} waits for its data for {_of(loading_ms, step_ms)}; "
            "more loader workers, or cheaper loading, would shorten it."
        )
    communication_ms = critical_path_ms.get("communication", 0.0)
    if peers_ms >= NAMED_FROM * step_ms and peers_ms >= communication_ms / 2:
        return (
            f"waits for peers: in collectives the {noun} waits for other ranks for {_of(peers_ms, step_ms)}, and "
            f"up to {_of(communication_ms - peers_ms, step_ms)} is transfer; equally fast ranks would help more "
            "than a faster network (the recordings of all ranks together show which one is late)."
        )
    if communication_ms >= NAMED_FROM * step_ms:
        return (
            f"communication-bound: the {noun} waits for communication, or for other ranks in it, for "
            f"{_of(communication_ms, step_ms)}; a faster network, or more overlap, would shorten it."
        )
    if not baseline.graph.has_gpu:
        bound = _cpu_bound(phase_cpu_ms, step_ms)
    else:
        bound = _gpu_or_host_bound(on_path, parts, step_ms, family_gpu_ms or {})
    late_rank, late_ms = held_up or (0, 0.0)
    held = f"ranks wait for rank {late_rank} for {_of(late_ms, step_ms)} on average"
    if late_ms >= NAMED_FROM * step_ms:
        return f"waits for peers: in collectives the other {held}; along the critical path the {noun} is {bound}"
    also = [
        f"the {noun} also waits for {name} for {_of(part_ms, step_ms)}"
        for name, part_ms in (("its data", loading_ms), ("communication", communication_ms))
        if part_ms >= MENTIONED_FROM * step_ms
    ]
    also += [f"other {held}"] if late_ms >= MENTIONED_FROM * step_ms else []
    return "; ".join([bound.removesuffix("."), *also]) + "."


def _cpu_bound(phase_cpu_ms: dict[str, float], step_ms: float) -> str:
    phase = max(phase_cpu_ms, key=lambda key: phase_cpu_ms[key], default="unknown")
    if phase == "unknown":
        return f"CPU-bound: the recording has no GPU work; CPU threads take the whole {step_ms:.2f} ms."
    return (
        f"CPU-bound: the recording has no GPU work; the {phase} phase is its largest part, "
        f"{_of(phase_cpu_ms[phase], step_ms)}."
    )


def _gpu_or_host_bound(
    on_path: dict[str, float], parts: Breakdown, step_ms: float, family_gpu_ms: dict[str, float]
) -> str:
    busy = f"the GPU is busy {_of(parts.gpu_busy_ms, step_ms)}"
    gpu_pct, host_pct = 100 * on_path["gpu"] / step_ms, 100 * on_path["host"] / step_ms
    if parts.gpu_busy_ms >= ALWAYS_BUSY * step_ms:
        return f"GPU-bound: {busy}{_mostly(family_gpu_ms)}; a faster CPU would change little."
    if min(gpu_pct, host_pct) >= 100 * NAMED_FROM:
        return (
            f"bound by both: {busy}, CPU work is {host_pct:.0f} % of the critical path and GPU work {gpu_pct:.0f} %; "
            "faster kernels and cheaper launches both help in part."
        )
    if gpu_pct > host_pct:
        share = f"its work is {gpu_pct:.0f} % of the critical path"
        return f"GPU-bound: {busy}{_mostly(family_gpu_ms)}, and {share}; a faster CPU would change little."
    return (
        f"host-bound: {busy}, and CPU work is {host_pct:.0f} % of the critical path; "
        "faster kernels would change little, fewer or cheaper launches would."
    )


def _mostly(family_gpu_ms: dict[str, float]) -> str:
    """The clause on the kernel family with most of the GPU's work, if its share is large; else ""."""
    family = max(family_gpu_ms, key=lambda name: family_gpu_ms[name], default="other")
    share = family_gpu_ms.get(family, 0.0) / max(sum(family_gpu_ms.values()), 1e-12)
    if family == "other" or share < NAMED_FROM:
        return ""
    return f", {100 * share:.0f} % of its work in {family.replace('_', ' ')} kernels"


def _of(part_ms: float, step_ms: float) -> str:
    digits = 2 if step_ms >= 1 else 4
    return f"{part_ms:,.{digits}f} of {step_ms:,.{digits}f} ms ({100 * part_ms / step_ms:.0f} %)"
