"""Steps traced from a module: against recordings of the same models, by hand, and models that cannot be traced."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.helpers import need
from whatif.from_module.gpu_work import kernels_of
from whatif.from_module.operations import OperatorGraph
from whatif.graph.memory import peak
from whatif.graph.types import Phase
from whatif.ingest.op_cost import op_cost
from whatif.runtime.errors import WhatifError

pytestmark = pytest.mark.slow

MODELS = Path(__file__).resolve().parent.parent / "operator_graph" / "predicted_models.py"
# Operators that a recording shows once for each call, whoever calls them.
COUNTED = (
    "mm", "addmm", "bmm", "convolution", "convolution_backward", "native_batch_norm", "native_batch_norm_backward",
    "native_layer_norm", "native_layer_norm_backward", "gelu", "gelu_backward", "embedding", "embedding_dense_backward",
    "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "threshold_backward",
    "max_pool2d_with_indices_backward", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_local_scalar_dense", "addcmul_", "addcdiv_",
)  # fmt: skip
TWINS = [
    ("resnet50", "momentum:foreach"), ("vgg19", "momentum:foreach"), ("densenet121", "momentum:foreach"),
    ("bert-base", "adam:for-loop"), ("gpt2-small", "adam:for-loop"),
]  # fmt: skip


def step_module() -> Any:
    need("torch")
    import importlib

    return importlib.import_module("whatif.instrumentation.trace_module.step")


def taken(name: str, *inputs: tuple[str, tuple[int, ...], str], **wanted: Any) -> OperatorGraph:
    step = step_module()
    found: OperatorGraph = step.take_down_step(step.Wanted(f"{MODELS}:{name}", inputs, **wanted))
    return found


@pytest.mark.parametrize(("name", "optimizer"), TWINS)
def test_a_step_is_the_recorded_one(name: str, optimizer: str, own_traces: Path) -> None:
    """Operators as often as recorded, FLOPs as recorded, memory within what libraries take beside tensors."""
    path = own_traces / "memory_cpu" / f"{name}.trace.json.gz"
    recording = json.loads(gzip.decompress(path.read_bytes()))
    graph = taken("twin", keywords={"name": name}, optimizer=optimizer, capability=None)
    marks = sorted(
        (e for e in recording["traceEvents"] if e.get("name", "").startswith("ProfilerStep#")), key=lambda e: e["ts"]
    )
    begin, end = marks[1]["ts"], marks[1]["ts"] + marks[1]["dur"]
    recorded = Counter(
        e["name"] for e in recording["traceEvents"] if e.get("cat") == "cpu_op" and begin <= e["ts"] < end
    )
    mine = Counter(operation.name for operation in graph.operations)
    names = [f"aten::{n}" for n in COUNTED]
    assert {n: mine[n] for n in names if mine[n]} == {n: recorded[n] for n in names if recorded[n]}
    recorded_flops = recording["whatif"]["flops"]["forward"]
    assert forward_flops(graph) == pytest.approx(recorded_flops, rel=0.01)
    memory = whatif.read(path).info.memory
    assert memory is not None
    # Convolutions of oneDNN copy tensors into layouts of their own: up to 4.2 % of these small models.
    tolerance = 0.045 if name in ("resnet50", "vgg19") else 0.001
    assert graph.peak_bytes == pytest.approx(peak(memory).total, rel=tolerance)


def forward_flops(graph: OperatorGraph) -> int:
    total = 0
    for operation in graph.operations:
        if operation.phase != Phase.FORWARD:
            continue
        name = operation.name.removesuffix("_for_cpu")  # the same product, under the GPU's name
        # The recording's are by torch's counter, which counts causal attention in full.
        concrete = [] if "attention" in name else operation.concrete
        cost = op_cost(name, operation.dims, operation.types, concrete)
        total += (cost.flops or 0) if cost else 0
    return total


def test_two_linear_layers_by_hand() -> None:
    graph = taken("TwoLinear", ("", (32, 8), ""), optimizer="sgd:for-loop", loss="sum")
    by_phase = {
        phase: [o.name.removeprefix("aten::") for o in graph.operations if o.phase == phase and o.outputs]
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
    }
    assert by_phase[Phase.FORWARD] == ["mm", "relu", "mm", "sum"]
    # Two gradients of the second layer, one of the first: its input needs none.
    assert [n for n in by_phase[Phase.BACKWARD] if n == "mm"] == ["mm"] * 3
    assert by_phase[Phase.UPDATE] == ["add_", "add_"]
    first, second = (o for o in graph.operations if o.phase == Phase.FORWARD and o.name == "aten::mm")
    assert (first.dims, second.dims) == ([[32, 8], [8, 16]], [[32, 16], [16, 4]])
    assert [call.name for call in graph.layer_calls] == ["up", "down", "(root)"]
    backward = [o for o in graph.operations if o.node.startswith("MmBackward")]
    assert {o.sequence for o in backward} == {first.sequence, second.sequence}
    # 8 x 16 + 16 x 4 numbers, and the batch.
    assert graph.resident_bytes == 4 * (128 + 64 + 32 * 8)
    assert graph.metadata["batch_size"] == 32
    assert [layer["parameters"] for layer in graph.metadata["layers"]] == [0, 128, 64]


def test_inference_has_a_forward_pass_alone() -> None:
    graph = taken("TwoLinear", ("", (32, 8), ""), inference=True)
    assert {operation.phase for operation in graph.operations} == {Phase.FORWARD}


@pytest.mark.parametrize(
    ("optimizer", "operators"),
    [("adam", {"_foreach_addcmul_": 1, "_foreach_addcdiv_": 1}), ("adamw:fused", {"_fused_adamw_": 1}),
     ("adam:for-loop", {"addcmul_": 2, "addcdiv_": 2}), ("none", {})],
)  # fmt: skip
def test_optimizers_in_their_implementations(optimizer: str, operators: dict[str, int]) -> None:
    graph = taken("TwoLinear", ("", (4, 8), ""), optimizer=optimizer)
    found = Counter(o.name.removeprefix("aten::") for o in graph.operations if o.phase == Phase.UPDATE)
    assert {name: found[name] for name in operators} == operators
    if not operators:
        assert not found


@pytest.mark.parametrize(("dtype", "scaled"), [("fp16", 1), ("bf16", 0)])
def test_fp32_copies_of_half_parameters(dtype: str, scaled: int) -> None:
    """Gradients are copied, unscaled in fp16 and clipped, the copies updated and copied back: 12 bytes a parameter."""
    graph = taken("TwoLinear", ("", (4, 8), ""), dtype=dtype, optimizer="adamw:master")
    found = Counter(o.name.removeprefix("aten::") for o in graph.operations if o.phase == Phase.UPDATE)
    names = ("_foreach_copy_", "_foreach_mul_", "_foreach_norm", "_fused_adamw_")
    assert [found[name] for name in names] == [2, 1 + scaled, 1, 1]
    optimizer = graph.metadata["optimizer"]
    assert optimizer["state_bytes"] == 12 * optimizer["parameters"] + 4 * optimizer["parameter_tensors"]
    with pytest.raises(WhatifError, match="expected --dtype fp16 or bf16 with --optimizer adamw:master"):
        taken("TwoLinear", ("", (4, 8), ""), optimizer="adamw:master")


def test_gpus_run_dropout_and_attention_as_one_operator() -> None:
    need("transformers")
    gpt2 = taken("gpt2", ("", (2, 16), "int64"))
    names = Counter(operation.name.removeprefix("aten::") for operation in gpt2.operations)
    assert names["_scaled_dot_product_efficient_attention"] == 2
    assert names["native_dropout"] == names["native_dropout_backward"] == 5
    half = taken("gpt2", ("", (2, 16), "int64"), dtype="bf16")
    assert sum(o.name == "aten::_scaled_dot_product_flash_attention" for o in half.operations) == 2
    eager = taken("gpt2", ("", (2, 16), "int64"), attention="eager")
    names = Counter(operation.name.removeprefix("aten::") for operation in eager.operations)
    assert (names["bmm"], names["_softmax"]) == (4 + 8, 2)


@pytest.mark.parametrize(
    ("heads", "value_size", "dtype", "kernel", "of_keys"),
    [
        (2, 16, "bf16", "flash", [2, 2, 10, 16]),
        (2, 16, "fp32", "", [2, 8, 10, 16]),
        (8, 8, "bf16", "efficient", [2, 8, 10, 16]),
        (8, 8, "fp32", "efficient", [2, 8, 10, 16]),
    ],
)
def test_attention_of_shared_heads_and_of_smaller_values(
    heads: int, value_size: int, dtype: str, kernel: str, of_keys: list[int]
) -> None:
    """FlashAttention was given copies of shared keys; scores of MLA's smaller values were all kept in memory."""
    graph = taken("HeadsOf", ("", (2, 10, 64), ""), keywords={"heads": heads, "value_size": value_size}, dtype=dtype)
    fused = [o for o in graph.operations if re.fullmatch("aten::_scaled_dot_product_[a-z]+_attention", o.name)]
    assert [o.name.split("_")[4] for o in fused] == [kernel] * bool(kernel)
    assert all(o.dims[1] == of_keys for o in fused)


@pytest.mark.parametrize(
    ("keywords", "inputs", "dtype", "kinds", "noted"),
    [
        ({}, [], None, {"c10::BFloat16"}, False),
        ({}, [("", (4, 8), "")], None, {"c10::BFloat16"}, False),
        ({}, [], "fp32", {"float"}, False),
        ({"input_dtype": "float32"}, [], "bf16", {"c10::BFloat16"}, False),
        ({"input_dtype": "float32"}, [], None, {"c10::BFloat16", "float"}, True),
    ],
)
def test_parameters_and_inputs_have_one_type(
    keywords: dict[str, Any], inputs: list[Any], dtype: str | None, kinds: set[str], noted: bool
) -> None:
    """A model built in bf16 was predicted in fp32; --dtype left the function's own inputs as they were."""
    graph = taken("half_with_input", *inputs, keywords=keywords, dtype=dtype)
    products = [o for o in graph.operations if o.name == "aten::mm" and o.phase == Phase.FORWARD]
    assert {kind for o in products for kind in o.types} == kinds
    assert any("multiplies" in note for note in graph.notes) == noted


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_as_on_the_device(reentrant: bool) -> None:
    """In the backward pass attention and dropout ran in parts: a GPT in bf16 took three times as long."""
    graph = taken("Checkpointed", ("", (2, 16, 64), ""), dtype="bf16", keywords={"reentrant": reentrant})
    for name in ("_scaled_dot_product_flash_attention", "native_dropout", "native_layer_norm"):
        calls = [o for o in graph.operations if o.name == f"aten::{name}"]
        forward = [o for o in calls if o.phase == Phase.FORWARD]
        again = [o for o in calls if o.recomputes >= 0]
        # A checkpoint that is not reentrant stops behind the last activation that it needs.
        assert len(forward) >= len(again) >= max(len(forward) - (not reentrant), 1)
        assert len(calls) == len(forward) + len(again)


@pytest.mark.parametrize(
    ("wanted", "fused"),
    [
        ({"dtype": "bf16"}, "_scaled_dot_product_flash_attention"),
        ({}, "_scaled_dot_product_efficient_attention"),
        ({"capability": None}, "_scaled_dot_product_flash_attention_for_cpu"),
    ],
)
def test_torchs_own_attention_layer_runs_the_fused_kernels_too(wanted: dict[str, Any], fused: str) -> None:
    layer = taken("encoder_layer", ("", (2, 16, 64), ""), **wanted)
    names = Counter(operation.name.removeprefix("aten::") for operation in layer.operations)
    assert (names[fused], names["bmm"]) == (1, 0)


@pytest.mark.parametrize("name", ["bert", "opt"])
def test_models_of_transformers_are_taken_down(name: str) -> None:
    need("transformers")
    graph = taken(name, ("input_ids", (2, 16), "int64"))
    names = Counter(operation.name.removeprefix("aten::") for operation in graph.operations)
    assert names["native_layer_norm"] == names["native_layer_norm_backward"] > 0
    assert names["_log_softmax"] == names["_log_softmax_backward_data"] == 1
    # Each product of the forward pass has two in the backward one; the embeddings have none.
    assert names["addmm"] + names["bmm"] + names["mm"] >= 3 * names["addmm"]


def test_seven_billion_parameters_need_no_memory() -> None:
    need("transformers")
    graph = taken("llama7", ("", (1, 16), "int64"), inference=True, dtype="bf16")
    assert graph.resident_bytes == pytest.approx(2 * 6.74e9, rel=0.01)


def test_a_program_may_look_at_its_positions() -> None:
    graph = taken("LooksAtPositions", ("", (2, 16, 8), ""))
    assert Phase.BACKWARD in {operation.phase for operation in graph.operations}
    assert any(operation.name == "aten::_local_scalar_dense" for operation in graph.operations)


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"given": True, "is_causal": True}])
def test_a_transformer_may_look_at_its_mask(keywords: dict[str, Any]) -> None:
    """A causal mask that follows from the shape is no data; without need of the mask itself, attention is fused."""
    graph = taken("Masked", ("", (2, 16, 64), ""), dtype="bf16", keywords=keywords)
    names = Counter(operation.name for operation in graph.operations)
    # The decoder attends to itself and to the encoder.
    assert names["aten::_scaled_dot_product_flash_attention"] == 3


def test_a_mask_of_unknown_values_needs_the_hint() -> None:
    with pytest.raises(WhatifError, match=r"whether its mask is causal \(is_causal, tgt_is_causal\), or record"):
        taken("Masked", ("", (2, 16, 64), ""), keywords={"given": True})


@pytest.mark.parametrize(
    ("target", "inputs", "said"),
    [
        (f"{MODELS}:LooksAtData", [("", (4, 8), "")], "_local_scalar_dense"),
        (f"{MODELS}:KeepsSome", [("", (4, 8), "")], "aten::index in layer '(root)', which returns as many elements as"),
        (f"{MODELS}:NamesItsDevice", [("", (4, 8), "")], "create tensors on the device of the inputs"),
        (f"{MODELS}:sparse_embedding", [], "expected dense tensors, got a sparse one"),
        (f"{MODELS}:lazy", [("y", (4, 8), "")], "do the inputs fit the model"),
        (f"{MODELS}:TwoLinear", [("", (4, 9), "")], "do the inputs fit the model"),
        (f"{MODELS}:TwoLinear", [("", (4, 8), ""), ("metadata", (4,), "")], "do the inputs fit the model"),
        (f"{MODELS}:TwoLinear", [], "expected --input SHAPE"),
        (f"{MODELS}:TwoLineal", [("", (4, 8), "")], "TwoLinear"),
        (f"{MODELS}:no_module", [("", (4, 8), "")], "got int"),
        (f"{MODELS}:TWINS", [("", (4, 8), "")], "got dict"),
        (f"{MODELS}:twin", [], "TypeError"),
        ("no_such_module:Model", [], "no_such_module"),
        ("no_such_file.py:Model", [], "no such file"),
        ("TwoLinear", [], "module:Model"),
        ("two:", [("", (4, 8), "")], "module:Model"),
    ],
)
def test_what_cannot_be_is_one_sentence(target: str, inputs: list[Any], said: str) -> None:
    step = step_module()
    with pytest.raises(WhatifError) as error:
        step.take_down_step(step.Wanted(target, inputs))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_lazy_layers_take_their_shapes_from_the_inputs() -> None:
    graph = taken("lazy", ("", (4, 8), ""), optimizer="sgd")
    assert [operation.dims[2] for operation in graph.operations if operation.name == "aten::addmm"] == [
        [8, 16],
        [16, 4],
    ]


def test_parameters_that_the_loss_does_not_reach_are_noted() -> None:
    noted = [note for note in taken("TwoOutputs", ("", (4, 8), "")).notes if "no gradient" in note]
    assert len(noted) == 1
    assert noted[0].startswith("2 of the trained parameters, such as second.weight, get ")
    assert not any("no gradient" in note for note in taken("TwoLinear", ("", (4, 8), "")).notes)


def test_bags_of_embeddings_read_their_rows_alone() -> None:
    kernels = [k for operation in taken("bag").operations if "bag" in operation.name for k in kernels_of(operation)]
    assert all(kernel.known for kernel in kernels)
    elements = [sum(n for name, n in kernel.what.integers if name == "elements") for kernel in kernels]
    # 64 rows of 8 numbers and their sums; the gradient of the table; its rows again.
    assert [len(elements), *sorted(elements)] == [3, (64 + 4) * 8 // 3, 64 * 8, 4000]


@pytest.mark.parametrize("optimizer", ["adamm", "adam:fastest", "sgd:fused", "sgd:master", ":"])
def test_unknown_optimizers(optimizer: str) -> None:
    with pytest.raises(WhatifError, match="expected"):
        taken("TwoLinear", ("", (4, 8), ""), optimizer=optimizer)


def test_the_operator_that_reads_a_value_is_named_with_its_layer() -> None:
    with pytest.raises(WhatifError, match=r"aten::_local_scalar_dense in layer '\(root\)'"):
        taken("LooksAtData", ("", (4, 8), ""))
