"""Pei et al.'s model of data parallel training on the GPUs of one machine: a parameter server on its CPU, or NCCL.

Source: Pei et al., "Iteration Time Prediction for CNN in Multi-GPU Platform: Modeling and Analysis", IEEE Access 2019,
        §III A, D and E, equations 1 and 20 to 32. Layers are numbered from the input; the exchange of layer l is hidden
        by the backward work of layer l - 1 alone, and the rest is exposed.
Deviations from the paper: equations 31 and 32 pair the backward work of layer l with the exchange of layer l - 1, which
        comes after it; 27 pairs it with that of layer l + 1, as the text and figure 6 do, and so does this. The second
        case of 31 is garbled: here the work left after the exchange continues undisturbed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.sigmoid import Sigmoid
from whatif.graph.types import Float64


@dataclass(frozen=True, slots=True)
class Machine:
    """The model's parameters of a machine: throughput of its links and memories, and its GPU's multiprocessors.

    ``link_num`` GPUs share a link to the host; ``copy_latency_ns`` is the latency of a copy to one more GPU (t_b_lat).
    """

    to_host: Sigmoid
    to_gpu: Sigmoid
    ring: Sigmoid
    host_byte_s: float
    gpu_byte_s: float
    multiprocessors: int
    copy_latency_ns: float
    link_num: int = 1


@dataclass(frozen=True, slots=True)
class Iteration:
    """One GPU's work in an iteration, ns; by layer, from the input, shape (n_layers,): backward work and gradients."""

    read_ns: float
    forward_ns: float
    backward_ns: Float64
    update_ns: float
    gradient_bytes: Float64


def parameter_server_ns(work: Iteration, gpus: int, machine: Machine) -> float:
    """Return an iteration whose gradients are averaged, and whose parameters are updated, on the host's CPU.

    The CPU reads one gradient per GPU and writes their average, at the speed of its memory.
    """
    on_cpu = (gpus + 1) * work.gradient_bytes / machine.host_byte_s * 1e9
    upload = machine.to_host.time_ns(work.gradient_bytes) * machine.link_num + on_cpu
    exposed = _showing(upload, work.backward_ns)
    down = machine.to_gpu.time_ns(work.gradient_bytes) * machine.link_num + (gpus - 1) * machine.copy_latency_ns
    return work.read_ns + work.forward_ns + float(work.backward_ns.sum()) + exposed + float(down.sum())


def nccl_ns(work: Iteration, gpus: int, machine: Machine) -> float:
    """Return an iteration whose gradients are all-reduced around a ring of the GPUs (equations 26 to 32)."""
    reduced = ring_all_reduce_ns(work.gradient_bytes, gpus, machine)
    backward = stretched_ns(work.backward_ns, reduced, machine.multiprocessors)
    return work.read_ns + work.forward_ns + float(backward.sum()) + _showing(reduced, backward) + work.update_ns


def ring_all_reduce_ns(gradient_bytes: Float64, gpus: int, machine: Machine) -> Float64:
    """Return each layer's all-reduce, ns, shape (n_layers,) (equations 28 to 30): chunks of 1 / gpus go around twice.

    Adding a chunk reads two and writes one in the GPU's memory.
    """
    chunk = gradient_bytes / gpus
    average = 3 * chunk / machine.gpu_byte_s * 1e9
    return (gpus - 1) * (2 * machine.ring.time_ns(chunk) + average)


def stretched_ns(backward_ns: Float64, all_reduce_ns: Float64, multiprocessors: int) -> Float64:
    """Return each layer's backward work and the all-reduce of the layer above it, ns, shape (n_layers,) (equation 31).

    The all-reduce occupies one multiprocessor while it runs.
    """
    share = (multiprocessors - 1) / multiprocessors
    beside = np.append(all_reduce_ns[1:], 0.0)
    all_along = backward_ns / share
    return np.where(beside >= all_along, all_along, beside + (backward_ns - beside * share))


def _showing(exchange_ns: Float64, backward_ns: Float64) -> float:
    """The exposed time of exchanges, ns (equations 23 and 27): the first layer's, and the unhidden part of others."""
    hidden = np.minimum(exchange_ns[1:], backward_ns[:-1])
    return float((exchange_ns[1:] - hidden).sum() + exchange_ns[0])
