"""The model argument of ``whatif predict``: code, a Hugging Face or timm name, or a file."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

import msgspec

from whatif.runtime.errors import WhatifError

CONFIG = "config.json"
TIMM_PREFIX = "timm:"
# Larger files are recordings or execution traces, not configurations.
_MOST_CONFIG_BYTES = 2**22
_CONFIG_KEYS = ("model_type", "architectures")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_EXPECTED = "module:Model, file.py:Model, a Hugging Face folder, config.json or cached name, timm:NAME, or a .onnx file"


class Kind(Enum):
    """The kind of a target."""

    MODULE = "code"
    HUGGING_FACE = "a Hugging Face model"
    TIMM = "a timm model"
    ONNX = "an ONNX file"
    CHAKRA = "an execution trace"


def kind_of(target: str) -> Kind:
    """Return the kind of ``target``. Raises WhatifError if it cannot be a model."""
    if target.startswith(TIMM_PREFIX):
        return Kind.TIMM
    path = Path(target).expanduser()
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        return Kind.ONNX
    if target.endswith((".json", ".json.gz")):
        return Kind.HUGGING_FACE if _is_config(path) else Kind.CHAKRA
    if path.is_dir():
        _check_folder(path)
        return Kind.HUGGING_FACE
    if ":" in target:
        return Kind.MODULE
    _refuse_file(target, path, suffix)
    return Kind.HUGGING_FACE


def _is_config(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        if path.name == CONFIG:
            return True
        if path.stat().st_size > _MOST_CONFIG_BYTES:
            return False
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # the reader of execution traces reports the error
        return False
    return isinstance(found, dict) and any(key in found for key in _CONFIG_KEYS)


def _check_folder(path: Path) -> None:
    if (path / CONFIG).is_file():
        return
    if (path / "adapter_config.json").is_file():
        raise WhatifError(
            f"{path}: expected a folder with {CONFIG}, got an adapter without its model; name the base model and use "
            "--lora."
        )
    has_tokenizer = any(path.glob("tokenizer*")) or any(path.glob("vocab*"))
    got = "only a tokenizer" if has_tokenizer else f"one without {CONFIG}"
    raise WhatifError(
        f"{path}: expected the folder of a Hugging Face model, got {got}; copy the model's {CONFIG} there."
    )


def _refuse_file(target: str, path: Path, suffix: str) -> None:
    """Raise WhatifError for a target that is neither a name nor a folder."""
    if suffix == ".py":
        raise WhatifError(f"{target}: expected file.py:Model, got only a file; name a class or function in it.")
    if suffix == ".ipynb":
        raise WhatifError(
            f"{target}: expected {_EXPECTED}, got a notebook; put the model into a .py file and name file.py:Model."
        )
    if suffix in _WEIGHTS:
        raise WhatifError(
            f"{target}: expected {_EXPECTED}, got weights, which contain no operators; name the folder with the "
            f"model's {CONFIG}."
        )
    if path.exists():
        raise WhatifError(f"{target}: expected {_EXPECTED}, got a file of another type.")
    if _HUB_NAME.fullmatch(target) is None:
        raise WhatifError(f"{target}: expected {_EXPECTED}, got no such file or folder.")
