"""``whatif predict``: a training step from a model alone, without a GPU or a recording."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whatif.cli.main import UsageError
from whatif.cli.options import add_json, add_plot, check_plots
from whatif.cli.reading import show
from whatif.errors import WhatifError

if TYPE_CHECKING:
    from whatif.from_module.operations import OperatorGraph
    from whatif.hardware.gpu import Gpu

_DTYPES = ("fp32", "fp64", "fp16", "bf16")
# A common training GPU with the most complete measurements.
_DEVICE = "A100-SXM-80"
_SUFFIXES = (".json", ".json.gz", ".onnx")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif predict``."""
    parser.usage = "whatif predict MODULE:MODEL --input SHAPE [NAME[:options] ...] [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="MODEL [NAME ...]",
        help="module:Model or file.py:Model (a torch.nn.Module, or a function that returns one, alone or with its "
        "inputs), a .onnx file, or a Chakra execution trace (.json); then what-ifs",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE",
        help="shape of an input, such as 64,3,224,224 or input_ids=8,512:int64 (repeatable)",
    )
    parser.add_argument(
        "--input-dtype", metavar="TYPE", help="type of inputs for which --input names none (default: --dtype)"
    )
    parser.add_argument("--device", default=_DEVICE, metavar="GPU", help=f"a GPU's name, or cpu (default: {_DEVICE})")
    parser.add_argument("--dtype", choices=_DTYPES, default="fp32", help="type of the parameters (default: fp32)")
    parser.add_argument(
        "--optimizer",
        default="adam",
        metavar="NAME[:HOW]",
        help="sgd, momentum, adam, adamw, adagrad, rmsprop or none; HOW: foreach, fused or for-loop (default: adam)",
    )
    parser.add_argument("--loss", choices=("auto", "cross_entropy", "mse", "sum"), default="auto", help="loss "
                        "if the model returns none (default: auto)")  # fmt: skip
    parser.add_argument("--attention", metavar="KIND", help="attention of a transformers model: eager or sdpa")
    parser.add_argument("--inference", action="store_true", help="predict the forward pass only, in evaluation mode")
    parser.add_argument(
        "--tf32",
        choices=("none", "conv", "all"),
        default="conv",
        help="fp32 operations that may use TF32 (default: conv, as in PyTorch)",
    )
    parser.add_argument("--kwargs", metavar="JSON", help='arguments to call MODEL with, such as {"layers": 12}')
    parser.add_argument(
        "--db",
        metavar="FOLDER",
        help="folder of the op database (default: $WHATIF_OPDB, else the one in your user data folder)",
    )
    parser.add_argument(
        "--measure", action="store_true", help="on this machine, measure operators that are not in the database"
    )
    parser.add_argument(
        "--save",
        metavar="FILE",
        help="write the step as a recording that all commands read; replaces an earlier one",
    )
    add_plot(parser, "plot the parts of the step")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the predicted step."""
    target, *names = args.words
    # Checks the options before building the model.
    inputs = [_input(text, args.input_dtype) for text in args.input]
    keywords = _keywords(args.kwargs)
    from whatif.prediction.transform import load_transform

    transforms = [load_transform(name) for name in names]
    device, gpu = _device(args.device)
    if args.save is not None:
        from whatif.files import replaceable_file
        from whatif.from_module.recording import is_predicted

        replaceable_file(args.save, "predicted recording", is_predicted)
    check_plots(args.plot, [target])
    graph = _graph(target, args, inputs, keywords, gpu)
    from whatif.from_module.predict_step import predict_step

    if args.measure:
        _measure(graph, device, args.db, on_host=gpu is None)
    from whatif.opdb.default import estimator

    predicted = predict_step(
        graph, estimator(device, database=args.db), gpu, dtype=args.dtype, tf32=args.tf32, transforms=transforms,
        save=None if args.save is None else Path(args.save),
    )  # fmt: skip
    from whatif.report.plot_predict import predicted_figure
    from whatif.report.text_predict import print_predicted

    return show(
        args,
        predicted.to_dict,
        lambda: print_predicted(predicted),
        figure=lambda: predicted_figure(predicted),
        warnings=(sentence for sentence in predicted.warnings if sentence != predicted.prediction.verdict),
    )


def _input(text: str, dtype: str | None) -> tuple[str, tuple[int, ...], str]:
    found = re.fullmatch(r"(?:([A-Za-z_]\w*)=)?(\d{1,9}(?:,\d{1,9})*)(?::(\w+))?", text, re.ASCII)
    if found is None:
        raise UsageError(f"predict: expected --input [NAME=]SIZES[:TYPE], such as 64,3,224,224, got {text!r}.")
    kind = found[3] or dtype or ""
    kinds = ("fp32", "fp64", "fp16", "bf16", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
    if kind and kind not in kinds:
        raise UsageError(f"predict: expected a type of inputs among {', '.join(kinds)}, got {kind!r}.")
    return found[1] or "", tuple(int(size) for size in found[2].split(",")), kind


def _keywords(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f'predict: expected --kwargs as JSON, {{"layers": 12}}, got {text!r}: {error}.') from None
    if not isinstance(found, dict):
        raise UsageError(f"predict: expected --kwargs as a JSON object, got {text!r}.")
    return found


def _device(told: str) -> tuple[str, Gpu | None]:
    """The database's name of a device, and its data sheet where it is a GPU."""
    from whatif.hardware.gpu import gpu_asked_for

    if told != "cpu" and not told.startswith("cpu:"):
        gpu = gpu_asked_for(told)
        return gpu.name, gpu
    if told != "cpu":
        return told, None
    at_hand = _online().at_hand()
    name = next((name for name in at_hand if name.startswith("cpu:")), None)
    if name is None:
        raise WhatifError("predict: expected a CPU of this machine that can be measured, got none; name a GPU.")
    return name, None


def _graph(
    target: str, args: argparse.Namespace, inputs: list[tuple[str, tuple[int, ...], str]], keywords: dict[str, Any],
    gpu: Gpu | None,
) -> OperatorGraph:  # fmt: skip
    if target.endswith(_SUFFIXES):
        return _read_graph(target)
    _need_torch()
    step = importlib.import_module("whatif.instrumentation.trace_module.step")
    capability = None
    if gpu is not None:
        # Devices of other vendors have no such number; their kernels are as new as Ampere's.
        capability = float(gpu.compute_capability or 8.0)
    wanted = step.Wanted(
        target, inputs, keywords, args.dtype, args.optimizer, args.loss, args.attention, args.inference, capability
    )
    from whatif.from_module.operations import OperatorGraph

    found = step.take_down_step(wanted)
    assert isinstance(found, OperatorGraph)  # the module is found by its name
    return found


def _read_graph(path: str) -> OperatorGraph:
    if path.endswith(".onnx"):
        from whatif.from_module.onnx_file import read_onnx

        return read_onnx(Path(path))
    from whatif.from_module.chakra import read_chakra

    return read_chakra(Path(path))


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise WhatifError(
            "predict: expected PyTorch, which lists the model's operators, got none; install it "
            "(pip install 'whatif-profiler[record]'), or give a Chakra execution trace or an ONNX file."
        )


def _online() -> Any:
    _need_torch()
    return importlib.import_module("whatif.instrumentation.profile_ops.online")


def _measure(graph: OperatorGraph, device: str, database: str | None, *, on_host: bool) -> None:
    """Measure the operators of a step that the database lacks, and insert them."""
    from whatif.from_module.durations import families_of
    from whatif.opdb.location import default_database

    online = _online()
    for ops in families_of(graph, on_host=on_host):
        online.measure(ops, device, database=database or default_database())
