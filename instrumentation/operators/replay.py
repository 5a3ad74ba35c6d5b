"""A recorded call as something that can be run again and again, alone: on fresh inputs, as training runs it."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .calls import Argument, Call, NotReplayable
from .schema import may_be_absent, overload_of
from .tensors import make_tensor

# Inputs and results are rotated over as many copies as fill this size, so that an operator finds them outside the
# caches, as what a forward pass saved is found in the backward pass; small ones stay in a cache, as in a step. With a
# number of copies instead, those of one form fit a cache of 32 MiB and those of the doubled batch did not: convolutions
# then took 2.4 times as long at twice the batch, but half as long at half of it.
ROTATED_BYTES = 96 << 20
MOST_COPIES = 16

# Targets and statistics get no gradient; a mask that asks for one would choose another attention kernel.
_WITHOUT_GRADIENT = frozenset({"running_mean", "running_var", "target", "attn_mask"})


@dataclass(frozen=True)
class _Forward:
    """The forward operator whose backward pass is the recorded operator.

    `renamed`: arguments that the backward operator names otherwise; `constants`: those that it does not have.
    """

    op: str
    renamed: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


_ATTENTION = _Forward("scaled_dot_product_attention", {"attn_mask": "attn_bias"})

# Backward operators that need what only their forward operator can make: workspaces, random states, packed weights.
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
# Inputs that are somebody's internal state: made up, they could crash the process.
_OPAQUE = frozenset({"workspace", "reserve", "reserveSpace", "weight_buf", "dropout_state", "batch_sizes"})


def copies_of(call: Call) -> int:
    """Over how many copies of its inputs a call is rotated; results are taken to be as large as the inputs."""
    return max(1, min(MOST_COPIES, ROTATED_BYTES // max(1, 2 * call.input_bytes)))


def make_replay(call: Call, device: torch.device, copies: int | None = None) -> list[Callable[[], Any]]:
    """Return the call on several sets of inputs, `copies_of(call)` by default; each function runs it once.

    A forward operator builds its autograd graph, a backward operator does not, as in training. Raises NotReplayable
    where its inputs cannot be made, and whatever torch raises for them.
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
    # In place on what needs a gradient is refused by autograd, and leaves no graph worth its time.
    with_graph = not call.backward and not call.op.endswith("_")
    run, _ = _bound(call, device, with_graph)
    if with_graph:
        return run

    def run_without_graph() -> Any:
        with torch.no_grad():
            return run()

    return run_without_graph


def _bound(call: Call, device: torch.device, with_graph: bool) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """The overload with its inputs, and those of them that ask for a gradient."""
    overload = overload_of(call)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    asking: list[torch.Tensor] = []
    for argument, expected in zip(call.arguments, overload._schema.arguments, strict=True):
        value = _input(argument, call, device, with_graph)
        asking += [one for one in (value if isinstance(value, list) else [value]) if _asks(one)]
        if expected.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return _as_called(call.op, overload, positional, named), asking


def _as_called(op: str, overload: Any, positional: list[Any], named: Mapping[str, Any]) -> Callable[[], Any]:
    """The operator as a program calls it, where it has such a name; else the overload.

    `torch.ops` checks its arguments in another, slower way: an addition took 2.7 us through it and 1.7 us as
    `torch.add`, a convolution 13.7 and 7.7 us; a step of such operators takes the sum of the latter (docs/profile.md).
    """
    overload_call = functools.partial(overload, *positional, **named)
    inputs = [argument for argument in overload._schema.arguments if not argument.kwarg_only]
    # As programs do: and a scale that is spelled by its place is another, deprecated call.
    while inputs and inputs[-1].has_default_value() and _is(positional[-1], inputs[-1].default_value):
        inputs, positional = inputs[:-1], positional[:-1]
    key = (overload, len(positional))
    if key not in _FUNCTIONS:
        scaled = any(argument.name == "alpha" for argument in inputs)
        _FUNCTIONS[key] = None if scaled else _function(op, len(overload._schema.returns), positional, named)
    function = _FUNCTIONS[key]
    return overload_call if function is None else functools.partial(function, *positional, **named)


# By overload and number of inputs; found by a trial, once.
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


def _is(value: Any, default: Any) -> bool:
    return not isinstance(value, torch.Tensor) and bool(value == default)


def _asks(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _input(argument: Argument, call: Call, device: torch.device, with_graph: bool) -> Any:
    if not argument.tensors:
        return argument.value
    tensors = [make_tensor(spec, argument, call, device) for spec in argument.tensors]
    if with_graph and argument.name not in _WITHOUT_GRADIENT:
        for tensor in tensors:
            tensor.requires_grad_(tensor.is_floating_point())
    return tensors if argument.is_list else tensors[0]


def _forward_call(call: Call, forward: _Forward) -> Call:
    """The forward call with the inputs that it shares with the backward one."""
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
    """The backward pass of the forward call's first result, which is run once here."""
    run, inputs = _bound(forward, device, with_graph=True)
    result = run()
    output = result[0] if isinstance(result, tuple) else result
    gradient = torch.randn_like(output)
    return functools.partial(torch.autograd.grad, output, inputs, gradient, retain_graph=True, allow_unused=True)
