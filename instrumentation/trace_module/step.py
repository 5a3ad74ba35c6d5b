"""Runs a training step on meta tensors and returns its operators: forward, loss, backward, update."""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from whatif.from_module.lora import Lora
from whatif.from_module.operations import OperatorGraph
from whatif.from_module.recurrent import CUDNN_OPERATORS
from whatif.from_module.targets import Kind, kind_of
from whatif.graph.types import Phase
from whatif.runtime.errors import WhatifError

from ..layers import GradientOrder, describe_layers
from ..metadata import describe_optimizer, describe_precision
from ..tensors import dtype_name, tensors_in
from .fine_tuning import add_lora, freeze
from .hugging_face import Built, build_hugging_face, build_timm
from .load import load_model
from .losses import loss_of
from .optimizers import fused_on_meta, make_optimizer, prepare_state
from .stand_ins import AsOnDevice
from .watch import Watch

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
INPUT_DTYPES = {
    **DTYPES, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int64": torch.int64,
    "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What to trace. ``inputs`` are (name or "", shape, dtype or "") each; ``capability`` None: a CPU.

    ``cudnn``: whether the GPU is one of NVIDIA, whose recurrent layers run in cuDNN.

    ``task`` and ``sizes`` ("batch", "seq", ...) are for models from a configuration. Without ``dtype`` parameters and
    inputs have the types of the configuration, else those that the code gives them.
    """

    target: str
    inputs: Sequence[tuple[str, tuple[int, ...], str]] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    optimizer: str = "adam"
    loss: str = "auto"
    attention: str | None = None
    inference: bool = False
    capability: float | None = 8.0
    cudnn: bool = True
    task: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    lora: Lora | None = None
    frozen: str | None = None


def take_down_step(wanted: Wanted) -> OperatorGraph:
    """Return the operators of one step of a model. Raises WhatifError, one sentence, if that fails."""
    training = _prepared(wanted)
    order = GradientOrder(training.model)
    watch = Watch(training.model, rounded=wanted.capability is not None)
    try:
        with fused_on_meta():
            resident = _resident(training)
            watch.ignore(resident)
            grad = torch.no_grad() if wanted.inference else nullcontext()
            with AsOnDevice(wanted.capability, cudnn=wanted.cudnn), torch.device("meta"), grad, watch:
                _run(training, watch, wanted.loss)
    except WhatifError:
        raise
    except Exception as error:
        raise _failed(wanted.target, watch.layer, error) from error
    finally:
        watch.remove()
        order.remove()
    in_cudnn = any(operation.name in CUDNN_OPERATORS for operation in watch.operations)
    notes = *training.notes, *_on_recurrent_layers(training.model, wanted.capability is None, in_cudnn=in_cudnn)
    if watch.mixed:
        notes = *notes, f"{watch.mixed}: a device does this under autocast alone; else give the inputs the model's type"
    resident_bytes = sum(t.untyped_storage().nbytes() for t in _distinct(resident) if t.is_meta)
    metadata = {**_metadata(training), "grad_ready_order": order.rows()}
    return OperatorGraph(
        wanted.target, watch.operations, watch.layer_calls, watch.allocations, resident_bytes, metadata, notes
    )


class _Training(NamedTuple):
    """What a step is run of: the model on meta, its inputs, its optimizer (None: inference), and notes for the user."""

    model: nn.Module
    positional: list[Any]
    named: dict[str, Any]
    optimizer: torch.optim.Optimizer | None
    notes: list[str]


def _prepared(wanted: Wanted) -> _Training:
    built = _built(wanted)
    model = built.model
    if wanted.attention is not None and kind_of(wanted.target) != Kind.TIMM:
        _set_attention(model, wanted)
    dtype = DTYPES[wanted.dtype] if wanted.dtype else built.dtype
    if dtype is None:  # the parameters stay as they were built
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    else:
        model.to(dtype)
    notes = [*built.notes]
    if wanted.lora is not None:
        notes.append(add_lora(model, wanted.lora, wanted.target))
    if wanted.frozen is not None:
        notes.append(freeze(model, wanted.frozen, wanted.target))
    model.train(not wanted.inference)
    positional, named = _inputs(wanted, built.inputs, dtype)
    if any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        try:  # lazy layers take their shapes from the first call
            with torch.no_grad(), torch.device("meta"):
                model(*positional, **named)
        except Exception as error:
            raise _failed(wanted.target, "", error) from error
    optimizer = None
    if not wanted.inference:
        optimizer = make_optimizer(wanted.optimizer, model, on_cpu=wanted.capability is None)
    return _Training(model, positional, named, optimizer, notes)


def _resident(training: _Training) -> list[torch.Tensor]:
    """Return the tensors that exist before a step: parameters, buffers, inputs, and the optimizer's state."""
    model, positional, named, optimizer, _ = training
    if optimizer is not None:
        prepare_state(optimizer)
    state = optimizer.state.values() if optimizer is not None else ()
    return [*model.parameters(), *model.buffers(), *tensors_in([positional, named]), *tensors_in(state)]


def _failed(target: str, layer: str, error: Exception) -> WhatifError:
    message = " ".join(str(error).split())[:300].rstrip(".")
    place = f" in layer {layer!r}" if layer else ""
    # torch knows the shapes of grouped products (mixtures of experts) in this format alone.
    if "of BF16 type" in message:
        hint = "use --dtype bf16."
    elif "compiled with CUDA" in message or "NVIDIA driver" in message or "to be on the same device" in message:
        hint = "create tensors on the device of the inputs (device=x.device), not on a device named in the code."
    elif re.search(r"\bmeta\b", message):
        hint = "without data and a device it cannot run: record a run with `whatif collect`."
    else:
        hint = "do the inputs fit the model (--input, --input-dtype)?"
    return WhatifError(
        f"{target}: running a step on shapes failed{place} with {type(error).__name__}: {message}; {hint} "
        "--debug shows where."
    )


def _metadata(training: _Training) -> dict[str, Any]:
    """Return what a recording's metadata has of model, first input and optimizer."""
    first = next(iter(tensors_in([training.positional, training.named])), None)
    return {
        "version": 1,
        "batch_size": int(first.shape[0]) if first is not None and first.dim() else None,
        "input_shape": list(first.shape) if first is not None else None,
        "input_dtype": dtype_name(first.dtype) if first is not None else None,
        "precision": describe_precision(training.model, None),
        "layers": describe_layers(training.model),
        "optimizer": describe_optimizer(training.optimizer),
        "torch": str(torch.__version__),
        "execution": {"compiled": False, "cuda_graph": False},
    }


def _built(wanted: Wanted) -> Built:
    kind = kind_of(wanted.target)
    if kind == Kind.HUGGING_FACE:
        labels = not wanted.inference and wanted.loss == "auto"
        return build_hugging_face(wanted.target, wanted.task, wanted.sizes, wanted.keywords, labels=labels)
    if kind == Kind.TIMM:
        return build_timm(wanted.target, wanted.sizes, wanted.keywords, wanted.attention)
    return Built(*load_model(wanted.target, wanted.keywords))


def _run(training: _Training, watch: Watch, loss_name: str) -> None:
    optimizer = training.optimizer
    output = training.model(*training.positional, **training.named)
    if optimizer is None:
        return
    loss, note = loss_of(output, loss_name)
    del output
    training.notes.append(note)
    watch.phase = Phase.BACKWARD
    # What loss.backward() calls, without the Python around it, in which AsOnDevice would be off: checkpoints compute
    # their operators again in the backward pass.
    engine: Any = torch.autograd.Variable._execution_engine  # untyped
    seed = torch.ones_like(loss)
    engine.run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    del seed
    del loss
    idle = [name for name, p in training.model.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        verb = "get" if len(idle) > 1 else "gets"
        training.notes.append(
            f"{len(idle)} of the trained parameters, such as {idle[0]}, {verb} no gradient from this loss: if the loss "
            "of training uses more outputs, their backward pass is missing; a model may return its own loss"
        )
    watch.phase = Phase.UPDATE
    optimizer.step()
    optimizer.zero_grad()


def _on_recurrent_layers(model: nn.Module, on_cpu: bool, *, in_cudnn: bool) -> list[str]:
    """Return notes on recurrent layers that a device runs in another way than meta tensors."""
    classes = {type(module).__name__ for module in model.modules() if isinstance(module, nn.RNNBase)}
    if in_cudnn:
        return [
            "recurrent layers are predicted as cuDNN runs them, in one call forward and one backward; only the range "
            "contains layers that overlap"
        ]
    if not on_cpu and classes:
        return [
            "recurrent layers are traced step by step, as meta tensors run them: a library's fused kernels take "
            "less time and memory"
        ]
    if classes - {"LSTM"}:
        return [
            "GRU and RNN layers are traced step by step, as meta tensors run them: a CPU computes the products "
            "with the inputs of all steps at once"
        ]
    return []


def _set_attention(model: nn.Module, wanted: Wanted) -> None:
    setter = getattr(model, "set_attn_implementation", None)
    if setter is None:
        raise WhatifError(
            f"{wanted.target}: expected a model of transformers for --attention, got {type(model).__name__}, whose "
            "attention cannot be changed."
        )
    try:
        setter(wanted.attention)
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        raise WhatifError(f"{wanted.target}: --attention {wanted.attention}: {message}") from error


def _inputs(wanted: Wanted, built: Any, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Return the model's inputs on meta: those given by the user, else those returned with the model."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, shape, kind in wanted.inputs:
        tensor = torch.empty(shape, dtype=INPUT_DTYPES[kind] if kind else dtype, device="meta")
        if name:
            named[name] = tensor
        else:
            positional.append(tensor)
    if positional or named:
        return positional, named
    if built is None:
        raise WhatifError(
            f"{wanted.target}: expected --input SHAPE (such as 64,3,224,224) or a function that returns the model with "
            "its inputs, got neither."
        )
    built = tree_map(lambda value: value.to("meta") if isinstance(value, torch.Tensor) else value, built)
    if wanted.sizes or wanted.dtype:  # those of a task have torch's default dtype
        built = tree_map(lambda value: value.to(dtype) if _is_floating(value) else value, built)
    if isinstance(built, dict):
        return [], built
    return (list(built) if isinstance(built, list | tuple) else [built]), {}


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return one tensor per storage: weights may be shared."""
    return list({t.untyped_storage()._cdata: t for t in tensors}.values())
