"""The kernels of recurrent layers in cuDNN: one call forward and one backward for all layers, directions and steps.

Standard algorithm: Appleyard, Kocisky and Blunsom, "Optimizing Performance of Recurrent Neural Networks on GPUs", 2016
(arXiv 1604.01946), sections 3.1 and 3.2. The gates of one cell are one product, the inputs of all steps are multiplied
at once, and each step is then one product and one pointwise kernel. Backward is the reverse, then one product for the
inputs' gradient and two for the weights'. A profile of cuDNN 9.25 on an RTX 5070 Ti shows these kernels (LSTM of
OpenNN's benchmarks, 24 steps). Layers and directions may overlap, which only the range contains.

Persistent algorithms keep the weights in registers. PyTorch's `get_algo` (aten/src/ATen/native/cudnn/RNN.cpp)
chooses one by the hidden size: one kernel for each layer and direction then runs all steps.

Compared with published times, ms, by `whatif predict`. RTX 2080 Ti (lcy-seso/Carrot, benchmarks/rnnlm, a language model
of three LSTMs): forward 5.8, predicted 6.3 (4.1 to 8.3); training 23.5, 23.0 (16.6 to 28.6). K80 (pull request 204 of
Tiramisu-Compiler/tiramisu, four LSTMs of 512 with their copies): 54.3, 57.7 (28.5 to 90.9). RTX 5070 Ti, the GPU's time
alone (OpenNN's benchmark; its host takes longer, under autocast): forward 0.059, 0.050; training 0.25, 0.20. TITAN Xp
(README of baidu-research/DeepBench, an LSTM of 1,024 without its inputs' products): 9.8, the same kernels for a
GTX 1080 Ti 10.4. Forward and backward of layers by the standard algorithm (pytorch/pytorch#62143; the GPU is not named,
so predicted for a V100 and an A100): of the 20 layers that set no range here, 37 of 40 predictions contain the measured
time, and predicted over measured is 0.6 to 1.8, in the median 1.2 for the V100 and 1.0 to 1.1 for the A100.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from whatif.from_module.kernel import Kernel, named
from whatif.from_module.moved_bytes import traffic
from whatif.from_module.operations import ELEMENT_BYTES, FORMATS, Operation
from whatif.ingest.op_cost import RNN_GATES, rnn_settings_at, rnn_sizes
from whatif.ingest.operator_calls import describe

CUDNN_OPERATORS = ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
_LSTM = 2  # cudnnRNNMode_t
# Layers and directions that do not depend on each other overlap: three layers of 512 took 2.0 times as long as one, and
# three of 1,024 took 3.3 to 3.7 times (TITAN X, batch 128, 30 steps: MaximumEntropy/cudnn_rnn_theano_benchmarks).
_OVERLAP = 1.5
# All steps share one error, which a range of independent ones does not have. Set on 10 of the layers of
# pytorch/pytorch#62143: 14 of 20 predictions contained the measured time without it, 17 with it.
_SHARED_ERROR = 2.0
# Pointwise kernels of one step take 1.3 to 1.5 us (OpenNN's profile above), a third of the shortest ones that the
# benchmarks behind some devices' estimates measured.
_POINTWISE_LOW = 1 / 3
# Up to these hidden sizes `use_rnn_persist_small_h` chooses a persistent kernel, forward and backward.
_SMALL = {1: (384, 256), 3: (192, 128), 4: (192, 128)}
# Time of one step in it, ns, forward and backward, by the number of gates, and the factor either way that contains
# nearly all: benchmarks of 20 LSTMs and 20 RNNs in pytorch/pytorch#62143 (GPU not named). A GRU was not among them. The
# independent profile of the RTX 5070 Ti has 1.7 us forward and 1.9 us backward for an LSTM.
_STEP_NS = {1: (750, 1500), 3: (1500, 3000), 4: (1500, 3000)}
_STEP_FACTOR = 4.0
# Beyond the sizes that are persistent backward too, the same benchmarks have 5.5 to 76 us for a step.
_LARGE_STEP_NS, _LARGE_STEP_FACTOR = 12_000, 7.0
# fp16 layers that `use_persist_common_heuristics` admits may be persistent as well, which depends on the device and the
# batch: the range contains both. Our estimate.
_HALF_LOW = 1 / 4


class _Rnn(Struct, frozen=True):
    """The arguments of a call; ``batches`` are the sequences that take part in each step."""

    kind: str  # "float"
    backward: bool
    mode: int
    input_size: int
    hidden: int
    projection: int  # 0: none
    layers: int
    directions: int
    dropout: float
    trains: bool
    weights: bool  # whether gradients of the weights are asked for
    packed: bool
    batches: tuple[int, ...]

    @property
    def state(self) -> int:
        """The size of what a step passes to the next one."""
        return self.projection or self.hidden

    @property
    def gates(self) -> int:
        """The width of all gates of one cell."""
        return RNN_GATES[self.mode] * self.hidden


def reserve_bytes(mode: int, hidden: int, rows: int, layers: int, directions: int, element_bytes: int) -> int:
    """Return the bytes that cuDNN keeps for the backward pass: gates, output and cell of each row. Our estimate."""
    return (RNN_GATES[mode] + 2) * hidden * rows * layers * directions * element_bytes


def without_persistence(operation: Operation) -> Operation:
    """Return a call as GPUs before compute capability 6.0 run it: as packed sequences, which no such kernel takes."""
    if operation.name not in CUDNN_OPERATORS:
        return operation
    at = rnn_settings_at(operation.name) + 8
    concrete = [*operation.concrete]
    if concrete[at] == "[]":
        batches = _of(operation.name, operation).batches
        concrete[at] = f"[{', '.join(map(str, batches))}]"
    return replace(operation, concrete=concrete)


def cudnn_kernels(name: str, operation: Operation) -> list[Kernel]:
    """Return the kernels of `_cudnn_rnn` or `_cudnn_rnn_backward`. Raises ValueError, IndexError on other inputs."""
    rnn = _of(name, operation)
    found: list[Kernel] = []
    order = range(rnn.layers)
    for layer in reversed(order) if rnn.backward else order:
        found += _layer(rnn, layer) * rnn.directions
        if rnn.dropout and rnn.trains and layer < rnn.layers - 1:
            size = sum(rnn.batches) * rnn.directions * rnn.state * ELEMENT_BYTES[rnn.kind]
            found.append(named("elementwise", "dropout", traffic(size, size, FORMATS[rnn.kind])))
    return found


def _of(name: str, operation: Operation) -> _Rnn:
    at, backward = rnn_settings_at(name), name.endswith("backward")
    mode, hidden, projection, layers, directions = rnn_sizes(name, operation.concrete)
    if operation.types[0] not in FORMATS:
        raise ValueError(f"no recurrent layer of cuDNN: {operation.types[0]}")
    first, dropout, train = operation.concrete[at + 4 : at + 7]
    packed = tuple(map(int, re.findall(r"\d+", operation.concrete[at + 8])))
    shape = operation.dims[0]
    steps, batch = (shape[1], shape[0]) if first == "True" else (shape[0], shape[1])
    return _Rnn(
        operation.types[0], backward, mode, shape[-1], hidden, projection, layers, directions,
        float(dropout), train == "True", backward and operation.concrete[21].endswith("True]"), bool(packed),
        packed or (batch,) * steps,
    )  # fmt: skip


def _layer(rnn: _Rnn, layer: int) -> list[Kernel]:
    """The kernels of one layer and direction."""
    rows = sum(rnn.batches)
    width = rnn.input_size if layer == 0 else rnn.directions * rnn.state
    recurrence = _persistent(rnn) or _steps(rnn)
    if not rnn.backward:
        return [_product(rnn, rows, width, rnn.gates), *recurrence]
    after = [_product(rnn, rows, rnn.gates, width)]
    if rnn.weights:
        read = rows * rnn.gates * ELEMENT_BYTES[rnn.kind]
        after += [
            _product(rnn, width, rows, rnn.gates),
            _product(rnn, rnn.state, rows, rnn.gates),
            named("reduce", "bias_gradient", traffic(read, 0, FORMATS[rnn.kind])),
        ]
        if rnn.projection:
            after.append(_product(rnn, rnn.hidden, rows, rnn.projection))
    return [*recurrence, *after]


def _steps(rnn: _Rnn) -> list[Kernel]:
    """The standard algorithm: products and pointwise kernels of all steps, one after another."""
    low = 1 / _SHARED_ERROR / (_OVERLAP if rnn.layers * rnn.directions > 1 else 1.0)
    if _may_persist_in_half(rnn):
        low *= _HALF_LOW
    found: list[Kernel] = []
    batches: Sequence[int] = rnn.batches[::-1] if rnn.backward else rnn.batches
    for batch, steps in groupby(batches):
        if rnn.backward:
            step = [_pointwise(rnn, batch), _product(rnn, batch, rnn.gates, rnn.state)]
        else:
            step = [_product(rnn, batch, rnn.state, rnn.gates), _pointwise(rnn, batch)]
        if rnn.projection:
            sizes = (rnn.projection, rnn.hidden) if rnn.backward else (rnn.hidden, rnn.projection)
            step.append(_product(rnn, batch, *sizes))
        found += [replace(kernel, low=kernel.low * low, high=_SHARED_ERROR) for kernel in step] * len(list(steps))
    return found


def _persistent(rnn: _Rnn) -> list[Kernel]:
    """The kernel that runs all steps, where PyTorch chooses it."""
    gates = RNN_GATES[rnn.mode]
    small = _SMALL[gates]
    if rnn.packed or rnn.projection or rnn.kind == "double" or rnn.hidden > small[rnn.backward]:
        return []
    large = rnn.hidden > small[True]
    step_ns = _LARGE_STEP_NS if large else _STEP_NS[gates][rnn.backward]
    factor = _LARGE_STEP_FACTOR if large else _STEP_FACTOR
    product = _product(rnn, sum(rnn.batches), rnn.state, rnn.gates)
    kernel = named("rnn", "persistent", product.what)
    return [replace(kernel, published_ns=float(len(rnn.batches) * step_ns), low=1 / factor, high=factor)]


def _may_persist_in_half(rnn: _Rnn) -> bool:
    sizes = rnn.hidden % 128 == 0 and rnn.input_size % 128 == 0 and rnn.hidden <= 1024
    single = rnn.layers * rnn.directions == 1 and not rnn.packed and not rnn.projection
    return rnn.kind == "c10::Half" and sizes and single


def _product(rnn: _Rnn, m: int, k: int, n: int) -> Kernel:
    what = describe("aten::mm", [[m, k], [k, n]], [rnn.kind, rnn.kind], ["", ""])
    if what is None:
        raise ValueError(f"no product of {rnn.kind}")
    return named("gemm", "recurrence", what)


def _pointwise(rnn: _Rnn, batch: int) -> Kernel:
    """Reads the gates of inputs and of the step before, and writes the states; keeps gates for the backward pass."""
    cell = batch * rnn.hidden * ELEMENT_BYTES[rnn.kind]
    states, gates = 1 + (rnn.mode == _LSTM), RNN_GATES[rnn.mode]
    read, written = 2 * gates + states - 1, states + gates * rnn.trains
    if rnn.backward:
        read, written = gates + 2 * states, gates + states - 1
    kernel = named("elementwise", "gates", traffic(read * cell, written * cell, FORMATS[rnn.kind]))
    return replace(kernel, low=_POINTWISE_LOW)
