"""Training of one model with one set of options."""

import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from whatif.instrumentation.gpu import GPU

from .loading import load
from .models import FULL, TWINS, Batch
from .offload import StreamOffload
from .update import UpdateInBackward
from .variants import Options

AMP_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "for": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}

# Side-stream steps before a capture, in which libraries choose algorithms and allocate workspaces.
CAPTURE_WARMUP_STEPS = 5


class Training:
    """A model and its batch in host memory; `start` moves them to the device, then each `step` is one training step.

    `step` adds no synchronization to that of training itself (GradScaler's check is part of fp16 training).
    """

    def __init__(self, model_name: str, options: Options, *, full: bool) -> None:
        torch.manual_seed(0)
        self._model_spec = (FULL if full else TWINS)[model_name]
        self._options = options
        self.samples = int(self._model_spec.samples * options.batch_factor)
        self.model = self._model_spec.build().train()
        self.batch = self._model_spec.make_batch(self.samples)
        self.step: Callable[[], None] = self._step

    @property
    def checkpointed(self) -> list[str]:
        """Qualified names of the layers with activation checkpointing."""
        if not self._options.checkpoint:
            return []
        named = self.model.named_modules()
        return [name for name, module in named if type(module).__name__ in self._model_spec.blocks]

    @property
    def captured(self) -> bool:
        """Whether a step replays a CUDA graph."""
        return self._options.execution == "cuda_graph"

    @property
    def optimizer_state(self) -> Any:
        """The optimizer's state, by parameter."""
        return self.optimizer.state if self._updates is None else self._updates.state

    def start(self, device: torch.device) -> None:
        """Move everything to the device and apply the options; captures the CUDA graph."""
        options = self._options
        set_precision(options.precision, old_settings=options.execution == "compile")
        torch.backends.cudnn.benchmark = False  # Its choices differ from run to run.
        self._device = device
        host_batch = self.batch
        self.model.to(device)
        inputs, target = self.batch
        self.batch = (tuple(tensor.to(device) for tensor in inputs), target.to(device))
        if options.channels_last:
            self._use_channels_last()
        if options.bn_eval:
            for module in self.model.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        for name in self.checkpointed:
            module = self.model.get_submodule(name)
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
        self._saving = self._saved_tensors_context()
        self._scaler = torch.amp.GradScaler(device.type, enabled=options.amp == "fp16")
        self.optimizer = self._make_optimizer()
        self._updates = (
            UpdateInBackward(self.model, type(self.optimizer), self.optimizer.defaults)
            if options.update_in_backward
            else None
        )
        self._forward: Callable[..., Any] = torch.compile(self.model) if options.execution == "compile" else self.model
        self._loader = self._make_loader(host_batch) if options.loader_workers >= 0 else None
        if self.captured:
            self.step = self._capture()

    def pause(self) -> None:
        """Suspend the loader's processes, so that another training has the machine."""
        self._signal_workers(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the loader's processes."""
        self._signal_workers(signal.SIGCONT)

    def _signal_workers(self, number: signal.Signals) -> None:
        # A process has at most one training with loader workers.
        for worker in multiprocessing.active_children() if self._options.loader_workers > 0 else ():
            assert worker.pid is not None
            os.kill(worker.pid, number)

    def close(self) -> None:
        """End the loader's processes and wait for the device."""
        self.resume()
        self._loader = None
        if self._device.type == "cuda":
            GPU.synchronize()

    def _use_channels_last(self) -> None:
        to_channels_last: Any = functools.partial(torch.Tensor.to, memory_format=torch.channels_last)
        model: Any = self.model
        model.to(memory_format=torch.channels_last)
        inputs, target = self.batch
        self.batch = (tuple(to_channels_last(tensor) for tensor in inputs), target)

    def _saved_tensors_context(self) -> Callable[[], Any]:
        if self._options.offload == "sync":
            pinned = self._device.type == "cuda"
            return functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned)
        if self._options.offload == "stream":
            return StreamOffload(self.model).hooks
        return contextlib.nullcontext

    def _make_optimizer(self) -> torch.optim.Optimizer:
        flags: Any = IMPLEMENTATIONS[self._options.implementation]
        if self._options.optimizer == "sgd":
            return torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, **flags)
        return torch.optim.Adam(
            self.model.parameters(), lr=1e-5, capturable=self._options.capturable or self.captured, **flags
        )

    def _make_loader(self, host_batch: Batch) -> Iterator[Batch]:
        return load(
            host_batch,
            samples=self.samples,
            baseline_samples=self._model_spec.samples,
            workers=self._options.loader_workers,
            device=self._device,
        )

    def _loss(self, inputs: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
        amp = AMP_TYPES.get(self._options.amp)
        autocast = torch.autocast(self._device.type, dtype=amp, enabled=amp is not None)
        # torch's default choice is not expressible as a list of backends.
        attention = sdpa_kernel(SDPBackend.MATH) if self._options.attention == "math" else contextlib.nullcontext()
        with self._saving(), autocast, attention:
            return self._model_spec.loss(self._forward(*inputs), target)

    def _step(self) -> None:
        inputs, target = self.batch if self._loader is None else next(self._loader)
        if self._updates is not None:  # which also frees the gradients
            loss: Any = self._loss(inputs, target)  # Partly untyped.
            loss.backward()
            return
        self.optimizer.zero_grad(set_to_none=True)
        passes = self._options.accumulate
        for _ in range(passes):
            loss = self._loss(inputs, target)
            if passes > 1:
                loss = loss / passes
            scaled: Any = self._scaler.scale(loss)  # Partly untyped.
            scaled.backward()
        self._scaler.step(self.optimizer)
        self._scaler.update()

    def _capture(self) -> Callable[[], None]:
        """Capture a whole step into a CUDA graph; its gradients live in the graph's own memory."""

        def warm() -> None:
            for _ in range(CAPTURE_WARMUP_STEPS):
                self._step()

        GPU.aside(warm)
        replay: Callable[[], None] = GPU.capture(self._step)
        return replay


def set_precision(mode: str, *, old_settings: bool) -> None:
    """Set the precision of float32 products, convolutions and RNNs on a GPU (ieee | tf32), or keep torch's defaults.

    `old_settings` uses the flags that all versions of torch's compiler read: mixing them with the new ones raises.
    """
    if mode == "default":  # convolutions and RNNs in TF32, products in fp32
        return
    backends: Any = torch.backends
    holders = [backends.cuda.matmul, *(getattr(backends.cudnn, name, None) for name in ("conv", "rnn"))]
    if old_settings or not all(hasattr(holder, "fp32_precision") for holder in holders):
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = mode == "tf32"
        return
    for holder in holders:
        holder.fp32_precision = mode
