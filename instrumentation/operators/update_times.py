"""Times of the optimizer's update alone, in each of torch's three implementations."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .calls import NotReplayable
from .timing import Clock, first_ns, measure_alone

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "for_loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
# Parameter, gradient and two moments in fp32.
BYTES_PER_PARAMETER = 16
# Usual value; a recording only shows that the optimizer has a state.
MOMENTUM = 0.9


def measure_updates(
    optimizer: dict[str, Any], shapes: Sequence[Sequence[int]], device: torch.device, clock: Clock, memory_bytes: int
) -> dict[str, float]:
    """Return the time in ns of one `step()` by implementation ("for_loop", "foreach", "fused") on such parameters.

    `optimizer` is the recording's metadata of that name. Its share of zeros in the second moments is set in the
    gradients, since MKL's square root of 0, in a loop over the parameters, takes ten times as long as another.
    Implementations that this torch lacks are left out. Raises NotReplayable for another optimizer than Adam, AdamW and
    SGD, without shapes, and for more than `memory_bytes`.
    """
    elements = sum(math.prod(shape) for shape in shapes)
    if not elements:
        raise NotReplayable("shapes of the parameters not recorded")
    if elements * BYTES_PER_PARAMETER * len(IMPLEMENTATIONS) > memory_bytes:
        raise NotReplayable("needs too much memory")
    replays: dict[str, list[Callable[[], Any]]] = {}
    for name, flags in IMPLEMENTATIONS.items():
        try:
            step = _optimizer(optimizer, shapes, device, flags).step
            step()
        except (RuntimeError, TypeError, ValueError):
            continue
        replays[name] = [step]
    estimates = {name: first_ns(replay, device) for name, replay in replays.items()}
    return measure_alone(replays, clock, estimates)[0] if replays else {}


def _optimizer(
    metadata: dict[str, Any], shapes: Sequence[Sequence[int]], device: torch.device, flags: dict[str, bool]
) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.randn(tuple(shape), device=device)) for shape in shapes]
    zero_share = metadata.get("zero_share")
    zero_share = min(max(zero_share, 0.0), 1.0) if isinstance(zero_share, int | float) else 0.0
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
        parameter.grad.view(-1)[: round(zero_share * parameter.numel())] = 0
    kind = metadata.get("type")
    if kind == "Adam":
        return torch.optim.Adam(parameters, **flags)  # type: ignore[arg-type]
    if kind == "AdamW":
        return torch.optim.AdamW(parameters, **flags)  # type: ignore[arg-type]
    if kind == "SGD":
        momentum = MOMENTUM if metadata.get("state_bytes") else 0.0
        return torch.optim.SGD(parameters, momentum=momentum, **flags)
    raise NotReplayable("optimizer is not Adam, AdamW or SGD")
