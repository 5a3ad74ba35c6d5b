"""A recorded call as a function that can be run repeatedly and alone: on fresh inputs, as training runs it."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .calls import Argument, Call, NotReplayable
from .schema import may_be_absent, overload_of
from .tensors import make_tensor

# Inputs and results rotate over enough copies to fill this size, so that they are not in the caches, like tensors that
# the forward pass saves for the backward pass; small ones stay cached, as in a step. With a fixed number of copies
# those of one variant fit a cache of 32 MiB and those of the doubled batch did not: convolutions then took 2.4 times as
# long at twice the batch, but half as long at half of it.
ROTATED_BYTES = 96 << 20
MOST_COPIES = 16

# Targets and statistics get no gradient; a mask that requires one would select another attention kernel.
_WITHOUT_GRADIENT = frozenset({"running_mean", "running_var", "target", "attn_mask"})


@dataclass(frozen=True)
class _Forward:
    """The forward operator whose backward pass is the recorded operator.

    `renamed`: arguments with other names in the backward operator; `constants`: those that it does not have.
    """

    op: str
    renamed: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


_ATTENTION = _Forward("scaled_dot_product_attention", {"attn_mask": "attn_bias"})

# Backward operators with inputs that only the forward operator can make: workspaces, random states, packed weights.
_TIED = {
    "_scaled_dot_product_flash_attention_backward": _ATTENTION,
    "_scaled_dot_product_efficient_attention_backward": _ATTENTION,
    "_scaled_dot_product_cudnn_attention_backward": _ATTENTION,
    "mkldnn_rnn_layer_backward": _Forward(
        "mkldnn_rnn_layer",
        {"weight0": "weight1", "weight1": "weight2", "weight2": "weight3", "weight3": "weight4", "cx_": "cx_tmp"},
    ),
    "_cudnn_rnn_backward": _Forward("_cudnn_rnn"),
    "cudnn_batch_norm_backward": _Forward(
        "cudnn_batch_norm", {"bias": "weight"}, {"training": True, "exponential_average_factor": 0.1}
    ),
}
# Inputs that are internal state: arbitrary values could crash the process.
_OPAQUE = frozenset({"workspace", "reserve", "reserveSpace", "weight_buf", "dropout_state", "batch_sizes"})


def copies_of(call: Call) -> int:
    """Return the number of copies of its inputs that a call rotates over; assumes results as large as the inputs."""
    return max(1, min(MOST_COPIES, ROTATED_BYTES // max(1, 2 * call.input_bytes)))


def make_replay(call: Call, device: torch.device, copies: int | None = None) -> list[Callable[[], Any]]:
    """Return the call on several sets of inputs, `copies_of(call)` by default; each function runs it once.

    A forward operator builds its autograd graph, a backward operator does not, as in training. Raises NotReplayable
    if its inputs cannot be made, and any error of torch for them.
    """
    copies = copies or copies_of(call)
    tied = _TIED.get(call.op)
    if tied is not None:
        return [_tied_replay(_forward_call(call, tied), device) for _ in range(copies)]
    for argument in call.arguments:
        if argument.name in _OPAQUE and argument.tensors:
            raise NotReplayable("needs an internal state")
    return [_replay(call, device) for _ in range(copies)]


def _replay(call: Call, device: torch.device) -> Callable[[], Any]:
    # Autograd refuses an in-place operator on a leaf that requires a gradient; its graph costs little.
    with_graph = not call.backward and not call.op.endswith("_")
    run, _ = _bind(call, device, with_graph)
    if with_graph:
        return run

    def run_without_graph() -> Any:
        with torch.no_grad():
            return run()

    return run_without_graph


def _bind(call: Call, device: torch.device, with_graph: bool) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """Return the overload bound to its inputs, and the inputs that require a gradient."""
    overload = overload_of(call)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    trained: list[torch.Tensor] = []
    for argument, expected in zip(call.arguments, overload._schema.arguments, strict=True):
        value = _input(argument, call, device, with_graph)
        tensors = value if isinstance(value, list) else [value]
        trained += [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
        if expected.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return _public_function(call.op, overload, positional, named), trained


def _public_function(op: str, overload: Any, positional: list[Any], named: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the torch function that a program would call, if the operator has one, else the overload.

    `torch.ops` parses its arguments more slowly: an addition took 2.7 us through it and 1.7 us as `torch.add`, a
    convolution 13.7 and 7.7 us; the time of a step is the sum of the latter (docs/profile.md).
    """
    overload_call = functools.partial(overload, *positional, **named)
    inputs = [argument for argument in overload._schema.arguments if not argument.kwarg_only]
    # Omit trailing defaults, as programs do: a positional alpha is another, deprecated signature.
    while inputs and inputs[-1].has_default_value() and _is_default(positional[-1], inputs[-1].default_value):
        inputs, positional = inputs[:-1], positional[:-1]
    key = (overload, len(positional))
    if key not in _FUNCTIONS:
        has_alpha = any(argument.name == "alpha" for argument in inputs)
        _FUNCTIONS[key] = None if has_alpha else _function(op, len(overload._schema.returns), positional, named)
    function = _FUNCTIONS[key]
    return overload_call if function is None else functools.partial(function, *positional, **named)


# By overload and number of inputs; each is found once by trying.
_FUNCTIONS: dict[tuple[Any, int], Callable[..., Any] | None] = {}


def _function(op: str, results: int, positional: list[Any], named: Mapping[str, Any]) -> Callable[..., Any] | None:
    internals: Any = torch._C
    for holder in (internals._VariableFunctions, internals._nn, internals.TensorBase):
        function: Callable[..., Any] | None = getattr(holder, op, None)
        if function is None:
            continue
        try:
            result = function(*positional, **named)
        except (TypeError, NotImplementedError):  # Another signature than the schema's.
            continue
        if results == (len(result) if isinstance(result, tuple) else 1):
            return function
    return None


def _is_default(value: Any, default: Any) -> bool:
    return not isinstance(value, torch.Tensor) and bool(value == default)


def _input(argument: Argument, call: Call, device: torch.device, with_graph: bool) -> Any:
    if not argument.tensors:
        return argument.value
    tensors = [make_tensor(spec, argument, call, device) for spec in argument.tensors]
    if with_graph and argument.name not in _WITHOUT_GRADIENT:
        for t in tensors:
            t.requires_grad_(t.is_floating_point())
    return tensors if argument.is_list else tensors[0]


def _forward_call(call: Call, forward: _Forward) -> Call:
    """Return the forward call with the inputs that it shares with the backward call."""
    overloads: Any = getattr(torch.ops.aten, forward.op)
    arguments = []
    for expected in overloads.default._schema.arguments:
        shared = call.argument(forward.renamed.get(expected.name, expected.name))
        if expected.name in forward.constants:
            arguments.append(Argument(expected.name, value=forward.constants[expected.name]))
        elif shared is not None and expected.name != "weight_buf" and expected.name != "dropout_state":
            arguments.append(replace(shared, name=expected.name))
        elif may_be_absent(expected):
            arguments.append(Argument(expected.name, value=expected.default_value))
        else:
            raise NotReplayable("needs an internal state")
    return Call(forward.op, tuple(arguments), backward=False)


def _tied_replay(forward: Call, device: torch.device) -> Callable[[], Any]:
    """Return the backward pass of the forward call's first result; runs the forward call once."""
    run, inputs = _bind(forward, device, with_graph=True)
    result = run()
    output = result[0] if isinstance(result, tuple) else result
    gradient = torch.randn_like(output)
    return functools.partial(torch.autograd.grad, output, inputs, gradient, retain_graph=True, allow_unused=True)
