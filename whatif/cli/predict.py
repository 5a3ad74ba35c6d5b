"""``whatif predict``: a training step from a model alone, without a GPU or a recording."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whatif.cli.options import add_json, add_plot, check_plots
from whatif.cli.reading import patience, show
from whatif.cli.status import UsageError
from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from whatif.from_module.operations import OperatorGraph
    from whatif.from_module.predict_step import PredictedStep
    from whatif.from_module.targets import Kind
    from whatif.hardware.gpu import Gpu
    from whatif.opdb.rows import Operators
    from whatif.prediction.predict import AnyTransform

_Shape = tuple[str, tuple[int, ...], str]
_DTYPES = ("fp32", "fp64", "fp16", "bf16")
# A common training GPU with the most complete measurements.
_DEVICE = "A100-SXM-80"
_OPTIMIZER = "adam"
# Options whose values a file of operators fixes.
_SET_BY_FILES = ("input", "input_dtype", "task", "dtype", "optimizer", "lora", "freeze", "loss", "attention", "kwargs")
_OF_TRAINING = ("optimizer", "freeze", "loss")
_TASKS = ("causal-lm", "masked-lm", "sequence-classification", "image-classification", "seq2seq")
# Sizes of a task's inputs; "target": positions that a seq2seq model writes.
_SIZES = ("batch", "seq", "target", "image")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif predict``."""
    parser.usage = "whatif predict MODULE:MODEL --input SHAPE [NAME[:options] ...] [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="MODEL [NAME ...]",
        help="module:Model or file.py:Model (a torch.nn.Module, or a function that returns one, alone or with its "
        "inputs), a Hugging Face model (folder, config.json, or name in the local cache), timm:NAME, a .onnx file, or "
        "a Chakra execution trace (.json); then what-ifs",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE",
        help="shape of an input, such as 64,3,224,224 or input_ids=8,512:int64 (repeatable); of a Hugging Face or timm "
        "model its sizes: batch=8,seq=2048, or batch=64,image=224",
    )
    parser.add_argument(
        "--task",
        choices=_TASKS,
        metavar="TASK",
        help=f"what a Hugging Face model is for: {', '.join(_TASKS)} (default: by its configuration's architecture)",
    )
    parser.add_argument(
        "--input-dtype",
        metavar="TYPE",
        help="type of inputs for which --input names none (default: the parameters')",
    )
    parser.add_argument("--device", default=_DEVICE, metavar="GPU", help=f"a GPU's name, or cpu (default: {_DEVICE})")
    parser.add_argument("--dtype", choices=_DTYPES, help="type of the parameters (default: that of a "
                        "Hugging Face configuration, or as the code builds them)")  # fmt: skip
    parser.add_argument(
        "--optimizer",
        metavar="NAME[:HOW]",
        help="sgd, momentum, adam, adamw, adafactor, adagrad, rmsprop or none; HOW: foreach, fused, for-loop or "
        f"master, fused with fp32 copies of half-precision parameters (default: {_OPTIMIZER})",
    )
    parser.add_argument(
        "--lora",
        metavar="r=RANK[,...]",
        help="train low-rank adapters alone, as PEFT does: r=16,targets=q_proj+v_proj,dropout=0.05",
    )
    parser.add_argument("--freeze", metavar="REGEX", help="do not train parameters whose names match")
    parser.add_argument("--loss", choices=("auto", "cross_entropy", "mse", "sum"), help="loss if the model returns "
                        "none (default: auto)")  # fmt: skip
    parser.add_argument("--attention", metavar="KIND", help="attention of a transformers or timm model: eager or sdpa")
    parser.add_argument("--inference", action="store_true", help="predict the forward pass only, in evaluation mode")
    parser.add_argument(
        "--tf32",
        choices=("none", "conv", "all"),
        default="conv",
        help="fp32 operations that may use TF32 (default: conv, as in PyTorch)",
    )
    parser.add_argument("--kwargs", metavar="JSON", help='arguments to call MODEL with, or fields of a '
                        'configuration to replace, such as {"layers": 12}')  # fmt: skip
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
        help="write the step, without the what-ifs, as a recording that all commands read; replaces an earlier one",
    )
    add_plot(parser, "plot the parts of the step")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the predicted step."""
    target, *names = args.words
    # Checks the options before building the model.
    from whatif.from_module.targets import kind_of

    kind = kind_of(target)
    wanted = _wanted(target, kind, args)
    from whatif.prediction.transform import load_transform

    transforms = [load_transform(name) for name in names]
    device, gpu = _device(args.device)
    if args.save is not None:
        from whatif.from_module.recording import is_predicted
        from whatif.runtime.files import replaceable_file

        replaceable_file(args.save, "predicted recording", is_predicted)
    check_plots(args.plot, [target])
    with patience("predicting"):
        predicted = _predicted(target, kind, wanted, device, gpu, args, transforms)
    from whatif.ingest.graph_of_events import NOT_RECORDED
    from whatif.report.plot_predict import predicted_figure
    from whatif.report.text_predict import print_predicted

    notes = predicted.prediction.notes
    # The verdict is printed, and that nothing was recorded is what predict does.
    known = (predicted.prediction.verdict, NOT_RECORDED, *notes)
    return show(
        args,
        predicted.to_dict,
        lambda: print_predicted(predicted),
        figure=lambda: predicted_figure(predicted),
        warnings=(sentence for sentence in predicted.warnings if sentence not in known),
        notes=notes,
    )


def _predicted(
    target: str, kind: Kind, wanted: dict[str, Any], device: str, gpu: Gpu | None, args: argparse.Namespace,
    transforms: Sequence[AnyTransform],
) -> PredictedStep:  # fmt: skip
    graph = _graph(target, kind, wanted, gpu)
    if args.measure:
        _measure(graph, device, args.db, on_host=gpu is None)
    from whatif.from_module.predict_step import predict_step
    from whatif.opdb.default import estimator

    return predict_step(
        graph, estimator(device, database=args.db), gpu, tf32=args.tf32, transforms=transforms,
        save=None if args.save is None else Path(args.save),
    )  # fmt: skip


def _wanted(target: str, kind: Kind, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``trace_module.step.Wanted`` that options give, checked before torch is imported."""
    from whatif.from_module.lora import lora_of
    from whatif.from_module.targets import Kind

    if kind in (Kind.ONNX, Kind.CHAKRA):
        _refuse_options_of_modules(target, kind, args)
    by_task = kind in (Kind.HUGGING_FACE, Kind.TIMM)
    if args.task is not None and kind != Kind.HUGGING_FACE:
        raise UsageError(f"predict: expected a Hugging Face model for --task, got {target!r}; leave --task out.")
    sizes, inputs = _sizes_or_shapes(args, by_task=by_task)
    if by_task and not args.input:
        raise UsageError("predict: expected --input batch=8,seq=2048 (text) or batch=64 (images), got no --input.")
    if args.inference and (listed := _listed(args, _OF_TRAINING)):
        raise UsageError(f"predict: expected none of the options of training with --inference, got {listed}.")
    if args.freeze is not None:
        try:
            re.compile(args.freeze)
        except re.error as error:
            raise UsageError(f"predict: expected --freeze REGEX, got {args.freeze!r}: {error}.") from None
    return {
        "target": target, "inputs": inputs, "keywords": keywords_of(args.kwargs), "dtype": args.dtype,
        "optimizer": args.optimizer or _OPTIMIZER, "loss": args.loss or "auto", "attention": args.attention,
        "inference": args.inference,
        "task": args.task, "sizes": sizes, "frozen": args.freeze,
        "lora": None if args.lora is None else lora_of(args.lora),
    }  # fmt: skip


def _refuse_options_of_modules(target: str, kind: Kind, args: argparse.Namespace) -> None:
    """Raise UsageError for options that a file of operators cannot honour."""
    from whatif.from_module.targets import Kind

    if listed := _listed(args, (*_SET_BY_FILES, *(("inference",) if kind == Kind.CHAKRA else ()))):
        raise UsageError(
            f"predict: {target}: expected none of the options that build a model, got {listed}; {kind.value} holds its "
            "operators and their shapes already, so leave them out, or name module:Model."
        )


def _listed(args: argparse.Namespace, names: Sequence[str]) -> str:
    """The options among ``names`` that were given, as people write them."""
    return ", ".join("--" + name.replace("_", "-") for name in names if getattr(args, name))


def _sizes_or_shapes(args: argparse.Namespace, *, by_task: bool) -> tuple[dict[str, int], list[_Shape]]:
    """The sizes of a task's inputs, or the shapes of a module's."""
    if not by_task or any(":" in text or re.search(r"=\d+,\d", text) for text in args.input):
        return {}, [input_of(text, args.input_dtype) for text in args.input]
    sizes: dict[str, int] = {}
    for part in ",".join(args.input).split(",") if args.input else ():
        found = re.fullmatch(rf"({'|'.join(_SIZES)})=(\d{{1,9}})", part.strip(), re.ASCII)
        if found is None or int(found[2]) == 0:
            raise UsageError(
                f"predict: expected --input with whole numbers above 0 for {', '.join(_SIZES)}, as batch=8,seq=2048, "
                f"got {part!r}."
            )
        sizes[found[1]] = int(found[2])
    return sizes, []


def input_of(text: str, dtype: str | None, command: str = "predict") -> _Shape:
    """Return name, shape and type of an --input. Raises UsageError, which begins with the command, on another text."""
    found = re.fullmatch(r"(?:([A-Za-z_]\w*)=)?(\d{1,9}(?:,\d{1,9})*)(?::(\w+))?", text, re.ASCII)
    if found is None:
        hint = "; batch=8,seq=2048 is for Hugging Face and timm models" if re.match(r"batch=|seq=", text) else ""
        raise UsageError(f"{command}: expected --input [NAME=]SIZES[:TYPE], such as 64,3,224,224, got {text!r}{hint}.")
    kind = found[3] or dtype or ""
    kinds = ("fp32", "fp64", "fp16", "bf16", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
    if kind and kind not in kinds:
        raise UsageError(f"{command}: expected a type of inputs among {', '.join(kinds)}, got {kind!r}.")
    sizes = tuple(int(size) for size in found[2].split(","))
    if 0 in sizes:
        raise UsageError(f"{command}: expected --input with sizes of 1 or more, got {text!r}.")
    return found[1] or "", sizes, kind


def keywords_of(text: str | None, command: str = "predict") -> dict[str, Any]:
    """Return the arguments in --kwargs. Raises UsageError, which begins with the command, if it is no JSON object."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f'{command}: expected --kwargs as JSON, {{"layers": 12}}, got {text!r}: {error}.') from None
    if not isinstance(found, dict):
        raise UsageError(f"{command}: expected --kwargs as a JSON object, got {text!r}.")
    return found


def _device(requested: str) -> tuple[str, Gpu | None]:
    """The database's name of a device, and its data sheet if it is a GPU."""
    from whatif.hardware.gpu import gpu_asked_for

    if requested != "cpu" and not requested.startswith("cpu:"):
        gpu = gpu_asked_for(requested)
        return gpu.name, gpu
    if requested != "cpu":
        return requested, None
    measurable = _online().at_hand()
    name = next((name for name in measurable if name.startswith("cpu:")), None)
    if name is None:
        raise WhatifError("predict: expected a CPU of this machine that can be measured, got none; name a GPU.")
    return name, None


def _graph(target: str, kind: Kind, wanted: dict[str, Any], gpu: Gpu | None) -> OperatorGraph:
    from whatif.from_module.operations import OperatorGraph
    from whatif.from_module.targets import Kind

    if kind == Kind.ONNX:
        from whatif.from_module.onnx_file import read_onnx

        return read_onnx(Path(target))
    if kind == Kind.CHAKRA:
        from whatif.from_module.chakra import read_chakra

        return read_chakra(Path(target))
    _need_torch()
    step = importlib.import_module("whatif.instrumentation.trace_module.step")
    # Devices of other vendors have no such number; their kernels are as new as Ampere's.
    capability = None if gpu is None else float(gpu.compute_capability or 8.0)
    cudnn = gpu is not None and gpu.vendor == "nvidia"
    found = step.take_down_step(step.Wanted(**wanted, capability=capability, cudnn=cudnn))
    assert isinstance(found, OperatorGraph)  # the module is found by its name
    return found


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
    """Measure the operators of a step that the database lacks, and insert them; warn of those that stay unmeasured.

    On a CPU, those that cannot be measured as a whole are measured as what a GPU would compute in their place.
    """
    from whatif.cli.reading import progress_bar, warn
    from whatif.from_module.durations import families_of, unanswered
    from whatif.opdb.default import estimator
    from whatif.opdb.location import default_database

    online = _online()
    folder = database or default_database()
    notes: list[str] = []

    def measure(families: Sequence[Operators], suffix: str) -> None:
        for ops in families:
            with progress_bar(f"measuring {ops.family}") as progress:
                found = online.measure(ops, device, database=folder, progress=progress)
            if found.missing:
                why = "; ".join(f"{reason} ({count})" for reason, count in found.left_out.most_common())
                note = f"not measured: {', '.join(found.missing)}: {why or 'no time was left'}{suffix}"
                notes.append(note)

    families = families_of(graph, on_host=on_host)
    measure(families, "; measured instead: what a GPU would compute" if on_host else "")
    if on_host:
        measure(unanswered(estimator(device, database=folder), graph), "")
    warn(notes, "note")
