"""Builds models of transformers and timm on meta tensors, without weights, network access or custom code."""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whatif.from_module.targets import CONFIG, TIMM_PREFIX
from whatif.runtime.errors import WhatifError, close_names


@dataclass(frozen=True)
class Built:
    """A model on meta tensors with its named inputs; ``dtype`` is that of its configuration."""

    model: nn.Module
    inputs: Any
    dtype: torch.dtype | None = None
    notes: tuple[str, ...] = ()


# Each task with transformers' class and the suffixes of its architectures' names.
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "causal-lm": ("AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel")),
    "masked-lm": ("AutoModelForMaskedLM", ("ForMaskedLM", "ForPreTraining")),
    "sequence-classification": ("AutoModelForSequenceClassification", ("ForSequenceClassification",)),
    "image-classification": ("AutoModelForImageClassification", ("ForImageClassification",)),
    "seq2seq": ("AutoModelForSeq2SeqLM", ("ForConditionalGeneration",)),
}
# Advice for tasks with other inputs, such as speech or images with text.
BY_FUNCTION = "for other inputs write a function that returns the model and its inputs, and name file.py:function"


def build_hugging_face(
    target: str, task: str | None, sizes: dict[str, int], overrides: dict[str, Any], *, labels: bool
) -> Built:
    """Return the model of a folder, a configuration file or a name in the local cache, with inputs for a task.

    ``sizes`` are "batch" and "seq" ("target": positions of seq2seq's labels) or "image" (pixels along a side);
    without any there are no inputs. ``overrides`` replace fields of the configuration. With ``labels`` the model
    returns its own loss. Raises WhatifError, one sentence, on anything that cannot be built.
    """
    transformers = _package("transformers", "transformers", target)
    if "trust_remote_code" in overrides:
        raise WhatifError(
            f"{target}: expected fields of the configuration in --kwargs, got trust_remote_code: whatif executes no "
            "code of a model's folder; write a function that builds the model and name file.py:function."
        )
    transformers.logging.set_verbosity_error()
    config = _config(transformers, target, overrides)
    task = task or _task_of(target, config)
    # Training and a single forward pass need no cache of keys and values.
    config.use_cache = False
    inputs = _inputs(target, task, config, sizes, labels=labels) if sizes else None
    auto = getattr(transformers, TASKS[task][0])
    model = _constructed(target, config, lambda: auto.from_config(config, trust_remote_code=False), task)
    part: Any
    for part in model.modules():
        if hasattr(part, "warn_if_padding_and_no_attention_mask"):
            part.warn_if_padding_and_no_attention_mask = _no_warning  # it reads tokens; there is no padding
    notes = [f"built as {type(model).__name__} from its configuration, without weights"]
    if getattr(config, "auto_map", None):
        notes.append("the folder's own code is not executed: the class of that name in transformers is used")
    if getattr(config, "quantization_config", None):
        notes.append("the configuration's quantization is not modelled")
    return Built(model, inputs, _dtype(config), tuple(notes))


def _no_warning(*args: Any) -> None:
    """Stand in for a warning about padding."""


def build_timm(target: str, sizes: dict[str, int], overrides: dict[str, Any], attention: str | None = None) -> Built:
    """Return a model of timm by its name ("timm:resnet50"), with images of its default size or of "image" pixels.

    ``attention`` "eager" builds it without fused attention.
    """
    timm = _package("timm", "timm", target)
    layers: Any = getattr(timm, "layers", None)  # older versions have neither it nor fused attention
    if attention == "eager" and hasattr(layers, "set_fused_attn"):
        layers.set_fused_attn(False)
    name = target.removeprefix(TIMM_PREFIX)
    if not timm.is_model(name):
        near = ", ".join(close_names(name, timm.list_models("*"), 4, 0.5))
        raise WhatifError(f"{target}: expected a model of timm, got {name!r}; similar names: {near or 'none'}.")
    model = _constructed(target, None, lambda: timm.create_model(name, pretrained=False, **overrides))
    cfg: Any = model.default_cfg
    if "image" in sizes and "img_size" not in overrides and tuple(cfg["input_size"][1:]) != (sizes["image"],) * 2:
        # Positions and windows depend on the size; models without them do not accept the argument.
        with contextlib.suppress(WhatifError):
            sized = {**overrides, "img_size": sizes["image"]}
            model = _constructed(target, None, lambda: timm.create_model(name, pretrained=False, **sized))
    if not sizes:
        return Built(model, None)
    _expect(target, "image-classification", sizes, ("batch",), ("image",))
    channels, height, width = cfg["input_size"]
    height, width = (sizes["image"],) * 2 if "image" in sizes else (height, width)
    return Built(model, [torch.empty(sizes["batch"], channels, height, width, device="meta")])


def _package(name: str, install: str, target: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise WhatifError(
            f"{target}: expected the package {name} to build this model, got none; pip install {install}, or name "
            "module:Model or file.py:Model."
        )
    try:
        return importlib.import_module(name)
    except Exception as error:  # torchvision of another build of torch raises RuntimeError
        missing = getattr(error, "name", None)
        advice = f"; pip install {missing.partition('.')[0]}" if missing else ""
        raise WhatifError(
            f"{target}: expected a package {name} that can be imported, got {type(error).__name__} ({error}){advice}."
        ) from error


def _config(transformers: Any, target: str, overrides: dict[str, Any]) -> Any:
    path = Path(target).expanduser()
    is_here = path.exists()
    try:
        return transformers.AutoConfig.from_pretrained(
            str(path) if is_here else target, local_files_only=True, trust_remote_code=False, **overrides
        )
    except Exception as error:  # OSError, ValueError, KeyError and validation errors: no common base
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            raise _custom_code(target) from error
        if not is_here and isinstance(error, OSError):
            raise WhatifError(
                f"{target}: expected module:Model, file.py:Model, a folder, or the name of a model in the local cache "
                f"of Hugging Face, got none of these; whatif uses no network: run `hf download {target} {CONFIG}`, "
                "which asks for access to a gated model, or name a folder."
            ) from error
        if any(words in text for words in ("model_type", "Unrecognized model", "does not recognize this architecture")):
            raise WhatifError(
                f"{target}: expected the {CONFIG} of a model that this version of transformers "
                f"({transformers.__version__}) knows, got another or no model_type; update transformers, or name "
                "file.py:Model."
            ) from error
        raise WhatifError(
            f"{target}: expected the configuration of a Hugging Face model, got one that transformers cannot read: "
            f"{text[:200].rstrip('.')}."
        ) from error


def _custom_code(target: str) -> WhatifError:
    return WhatifError(
        f"{target}: expected a model whose code is in transformers, got one with code of its own, which whatif does "
        "not execute (trust_remote_code stays off); write a function that builds it and name file.py:function."
    )


def _task_of(target: str, config: Any) -> str:
    names = getattr(config, "architectures", None) or ()
    for name in names:
        for task, (_, endings) in TASKS.items():
            if str(name).endswith(endings):
                return task
    got = f"the architecture {names[0]}" if names else "no architecture"
    raise WhatifError(
        f"{target}: expected a configuration whose architecture implies a task, got {got}; give --task with one "
        f"of {', '.join(TASKS)}; {BY_FUNCTION}."
    )


def _constructed(target: str, config: Any, build: Callable[[], nn.Module], task: str = "") -> nn.Module:
    try:
        try:
            with torch.device("meta"):
                return build().to("meta")
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error).lower():
                raise
            # Some constructors compute with values, which need real tensors and their memory.
            return build().to("meta")
    except Exception as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            raise _custom_code(target) from error
        if "Unrecognized configuration class" in text:
            raise WhatifError(
                f"{target}: expected a model for {task}, got a {config.model_type}, which transformers cannot build "
                f"for this task; give --task with another one of {', '.join(TASKS)}; {BY_FUNCTION}."
            ) from error
        raise WhatifError(
            f"{target}: building it failed with {type(error).__name__}: {text[:200].rstrip('.')}; --debug shows where."
        ) from error


def _dtype(config: Any) -> torch.dtype | None:
    dtype = getattr(config, "dtype", None)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return dtype if isinstance(dtype, torch.dtype) else None


def _expect(target: str, task: str, sizes: dict[str, int], needed: tuple[str, ...], more: tuple[str, ...] = ()) -> None:
    if set(needed) <= set(sizes) <= {*needed, *more}:
        return
    raise WhatifError(
        f"{target}: expected --input {','.join(f'{name}=...' for name in needed)} for {task}"
        f"{f' (and {more[0]}=...)' if more else ''}, got {','.join(f'{name}={size}' for name, size in sizes.items())}."
    )


def _inputs(target: str, task: str, config: Any, sizes: dict[str, int], *, labels: bool) -> dict[str, Any]:
    """Return the task's inputs on meta, without an attention mask, as for a batch without padding."""
    if task == "image-classification":
        return _image_inputs(target, config, sizes, labels=labels)
    _expect(target, task, sizes, ("batch", "seq"), ("target",) if task == "seq2seq" else ())
    batch, seq = sizes["batch"], sizes["seq"]
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < seq:
        raise WhatifError(
            f"{target}: expected seq of at most {most:,}, the configuration's max_position_embeddings, got {seq:,}; "
            f"use a smaller seq, or --kwargs '{{\"max_position_embeddings\": {seq}}}'."
        )
    if task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # any value works
    found = {"input_ids": _token_ids(batch, seq)}
    if task == "sequence-classification":
        if text.pad_token_id is None:  # a batch needs one to find the last token of each sequence
            text.pad_token_id = config.pad_token_id = 0
        target_labels = _class_labels(batch, config)
    else:
        target_labels = _token_ids(batch, sizes.get("target", seq))
    if labels:
        found["labels"] = target_labels
    elif task == "seq2seq":
        found["decoder_input_ids"] = target_labels
    return found


def _image_inputs(target: str, config: Any, sizes: dict[str, int], *, labels: bool) -> dict[str, Any]:
    _expect(target, "image-classification", sizes, ("batch",), ("image",))
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    if "image" in sizes:
        height = width = sizes["image"]
    batch, channels = sizes["batch"], getattr(config, "num_channels", 3)
    found = {"pixel_values": torch.empty(batch, channels, height, width, device="meta")}
    return {**found, "labels": _class_labels(batch, config)} if labels else found


def _token_ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _class_labels(batch: int, config: Any) -> torch.Tensor:
    # With one class transformers fits a number (modeling code: problem_type "regression").
    return torch.empty(batch, device="meta") if config.num_labels == 1 else _token_ids(batch)
