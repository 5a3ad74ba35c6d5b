"""The last source of the chain: estimates from a data sheet alone, family by family, with a range.

- convolutions in fp32 and fp64: Pei et al.'s abstract instruction queue, the faster of im2col and FFT
  (``whatif.opdb.queue_layers``); on NeuSight's convolutions its error is below the roofline's on each of five GPUs
  (docs/instruction_queue.md).
- convolutions in the formats of a device's tensor cores: ``whatif.opdb.tensor_convolutions``.
- collectives: NCCL's own tuner (``whatif.opdb.analytic_collectives``).
- all others, and convolutions on devices or in formats that the queue does not know: the roofline model
  (``whatif.opdb.data_sheet``).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from whatif.graph.types import Bool, Float64
from whatif.hardware.gpu import Gpu
from whatif.opdb import data_sheet
from whatif.opdb.analytic_collectives import answers_collective, collective_analytic
from whatif.opdb.queue_layers import queue_s
from whatif.opdb.rows import Operators
from whatif.opdb.tensor_convolutions import tensor_convolutions

ConvLaw = Literal["queue", "roofline"]

# The queue's nominal 90 % range: 5 and 95 % of measured over estimated time on a V100 (NeuSight's convolutions); its
# DOP was chosen on the same rows.
QUEUE_LOW_FACTOR, QUEUE_HIGH_FACTOR = 1.6, 2.2


def answers_analytically(gpu: Gpu | None, ops: Operators) -> Bool:
    """Return a mask, shape (n,), of the operators that can be estimated from a data sheet."""
    if gpu is not None and ops.family == "collective":
        return answers_collective(gpu, ops)
    return data_sheet.answers_analytically(gpu, ops)


def analytic_answers(
    gpu: Gpu, ops: Operators, *, launch: bool, conv_law: ConvLaw = "queue"
) -> tuple[Float64, Float64, Float64]:
    """Return an estimate from the data sheet alone and its nominal 90 % range, seconds, shape (n,) each.

    ``conv_law`` selects the model of convolutions. NaN for collectives that ``answers_analytically`` excludes.
    """
    if ops.family == "collective":
        return collective_analytic(gpu, ops)
    t, low, high = data_sheet.analytic_s(gpu, ops, launch=launch)
    floor = data_sheet.floor_s(gpu, launch=launch)
    if ops.family == "conv" and conv_law == "queue":
        queue = queue_s(gpu, ops) + floor
        known = np.isfinite(queue)
        # The range respects the lower bound of any kernel as well.
        least = np.maximum(queue / QUEUE_LOW_FACTOR, data_sheet.bound_s(gpu, ops, cold=False))
        t = np.where(known, queue, t)
        low = np.where(known, np.minimum(least, queue), low)
        high = np.where(known, queue * QUEUE_HIGH_FACTOR, high)
    if ops.family == "conv":
        # Formats of the device's tensor cores, which the queue does not cover.
        units = tensor_convolutions(gpu, ops)
        known = np.isfinite(units[0])
        t, low, high = (np.where(known, of + floor, old) for of, old in zip(units, (t, low, high), strict=True))
    return t, low, high
