"""Metadata of a recording besides its events: optimizer, input, precision and machine."""

import functools
import platform
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from whatif.runtime.threads import usable_cores

from .gpu import GPU
from .layers import HookHere, Hooks
from .tensors import dtype_name, tensors_in

_LIBRARIES = (
    *("numpy", "triton", "torchvision", "torchaudio", "transformers", "accelerate", "lightning", "pytorch_lightning"),
    *("timm", "deepspeed", "apex", "xformers", "flash_attn", "transformer_engine", "bitsandbytes", "cupy"),
)


def describe_environment(cuda: bool) -> dict[str, Any]:
    """Return the versions and hardware that the times depend on; nothing that identifies the machine or its user."""
    cudnn: Any = torch.backends.cudnn  # Partly untyped.
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": cudnn.version() if cuda else None,
        "gpu": GPU.properties().name if cuda else None,
        "cpu": _cpu_name(),
        "cpu_cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "libraries": _library_versions(),
    }


def _library_versions() -> dict[str, str]:
    """Return the versions of those libraries that the program has imported and whose code may run in its steps."""
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES}
    return {name: str(version) for name, version in versions.items() if version is not None}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # Not Linux.
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def describe_optimizer(
    optimizer: torch.optim.Optimizer | None, others: Sequence[torch.optim.Optimizer] = ()
) -> dict[str, Any] | None:
    """Return type and implementation flags (null: torch chose) of the optimizer, and tensors and bytes of state.

    ``others`` are the step's other optimizers, whose tensors and state count as well.
    """
    if optimizer is None:
        return None
    every = (optimizer, *(other for other in others if other is not optimizer))
    parameters = [parameter for each in every for group in each.param_groups for parameter in group["params"]]
    slots = (slots for each in every for slots in each.state.values())
    state = (value for kept in slots for value in kept.values() if torch.is_tensor(value))
    return {
        "type": type(optimizer).__name__,
        "foreach": optimizer.defaults.get("foreach"),
        "fused": optimizer.defaults.get("fused"),
        "capturable": optimizer.defaults.get("capturable"),
        "parameter_tensors": len(parameters),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "state_bytes": sum(tensor.nbytes for tensor in state),
    }


def zero_share(optimizer: torch.optim.Optimizer | None) -> float:
    """Return the share of Adam's second moments on a CPU that are 0, as for an embedding's rows not yet used."""
    states = optimizer.state.values() if optimizer is not None else ()
    moments = [slots["exp_avg_sq"] for slots in states if torch.is_tensor(slots.get("exp_avg_sq"))]
    # For a sharded tensor only this rank's part: counting all of it would wait for ranks that may not call this.
    moments = [moment.to_local() if hasattr(moment, "to_local") else moment for moment in moments]
    moments = [moment for moment in moments if moment.device.type == "cpu" and type(moment) is torch.Tensor]
    moments = [moment for moment in moments if moment.layout == torch.strided and not moment.is_quantized]
    elements = sum(moment.numel() for moment in moments)
    nonzero = sum(int(torch.count_nonzero(moment)) for moment in moments)
    return round(1 - nonzero / elements, 4) if elements else 0.0


class FirstInput(Hooks):
    """Records the model's first input, whose leading dimension is the batch size, and autocast.

    Autocast may be entered inside the model's forward call: submodules are checked as well.
    """

    def __init__(self, model: nn.Module, *, trained: bool) -> None:
        self.shape: list[int] | None = None
        self.dtype: str | None = None
        self.autocast: str | None = None
        self.samples = 0  # of all calls of the model except those that an optimizer repeats on one batch
        self._model, self._trained = model, trained
        self._repeats = False  # inside a closure that its optimizer calls again in this step
        self._last: tuple[weakref.ref[torch.Tensor], int] | None = None  # since the last update: input and weights
        # On all modules: the script may call another method of the model than forward. The outermost call comes first.
        self._handles = [
            module.register_forward_pre_hook(HookHere(self._before_forward), with_kwargs=True)
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        if trained:
            self._handles.append(register_optimizer_step_pre_hook(self._watch_closure))

    def _watch_closure(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments of an optimizer's step with a closure (LBFGS) that records repeated calls."""
        self._last = None
        closure = args[1] if args[1:] else kwargs.get("closure")
        if torch.compiler.is_compiling() or not callable(closure):
            return None
        calls = 0

        @functools.wraps(closure)
        def watched() -> Any:
            nonlocal calls
            calls, self._repeats = calls + 1, calls > 0
            try:
                return closure()
            finally:
                self._repeats = False

        return ((args[0], watched, *args[2:]), kwargs) if args[1:] else (args, {**kwargs, "closure": watched})

    def _before_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or (self.autocast is not None and module is not self._model):
            return
        if self._trained and not torch.is_grad_enabled():  # an evaluation
            return
        tensor = next((t for t in tensors_in([*args, *kwargs.values()]) if t.dim() > 0), None)
        if tensor is None:
            return
        if module is self._model and not self._repeats and not self._moved(tensor):
            self.samples += int(tensor.shape[0])
        if self.shape is None:
            self.shape = list(tensor.shape)
            self.dtype = dtype_name(tensor.dtype)
        if torch.is_autocast_enabled(tensor.device.type):
            self.autocast = dtype_name(torch.get_autocast_dtype(tensor.device.type))

    def _moved(self, tensor: torch.Tensor) -> bool:
        """Whether this is the last call's input once more, with weights that no update has moved since (SAM)."""
        before, weights = self._last, sum(one._version for one in self._model.parameters() if one.requires_grad)
        self._last = (weakref.ref(tensor), weights)
        return self._trained and before is not None and before[0]() is tensor and before[1] != weights


def describe_precision(model: nn.Module, autocast: str | None) -> dict[str, Any]:
    """Return the parameters' type, the autocast type (null: off) and the switches that choose CUDA's kernels.

    `matmul`, `conv` and `rnn` are the precision of float32 products ("ieee", "tf32", "none": torch's default).
    """
    dtypes = sorted({dtype_name(parameter.dtype) for parameter in model.parameters()})
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    return {
        "parameters": dtypes[0] if len(dtypes) == 1 else dtypes,
        "autocast": autocast,
        "matmul": _setting(matmul, "fp32_precision"),
        "conv": _setting(getattr(cudnn, "conv", None), "fp32_precision"),
        "rnn": _setting(getattr(cudnn, "rnn", None), "fp32_precision"),
        "matmul_allow_tf32": _setting(matmul, "allow_tf32"),
        "cudnn_allow_tf32": _setting(cudnn, "allow_tf32"),
        "cudnn_benchmark": _setting(cudnn, "benchmark"),
        "cudnn_deterministic": _setting(cudnn, "deterministic"),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _setting(backend: Any, name: str) -> Any:
    """Return a backend's switch; None if this torch does not have it or cannot read it."""
    try:
        return getattr(backend, name, None)
    except RuntimeError:  # The old switch cannot be read after the new one was set.
        return None
