"""Loads and builds the model named by the user, without memory for its parameters."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from whatif.runtime.errors import WhatifError


def load_model(target: str, keywords: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Return the module that ``target`` ("package.module:Model" or "file.py:function") names, on meta tensors.

    The target is a module, or a class or function that returns one, alone or with example inputs, which are
    returned as well (else None). It is called with ``keywords``. Raises WhatifError, one sentence, on anything else.
    """
    found = _attribute(target)
    if isinstance(found, nn.Module):
        if keywords:
            raise WhatifError(f"{target}: expected a class or a function for --kwargs, got a module instance.")
        return found.to("meta"), None
    if not callable(found):
        raise WhatifError(
            f"{target}: expected a module, or a class or function that returns one, got {type(found).__name__}."
        )
    net = _build(target, found, keywords)
    inputs = None
    if isinstance(net, tuple) and len(net) == 2 and isinstance(net[0], nn.Module):
        net, inputs = net
    if not isinstance(net, nn.Module):
        raise WhatifError(f"{target}: expected a torch.nn.Module, alone or with its inputs, got {type(net).__name__}.")
    return net.to("meta"), inputs


def _build(target: str, found: Any, keywords: dict[str, Any]) -> Any:
    try:
        try:
            with torch.device("meta"):
                return found(**keywords)
        except RuntimeError as error:
            if "meta" not in str(error).lower():
                raise
            # Some constructors compute with values, which need real tensors and their memory.
            return found(**keywords)
    except Exception as error:
        raise _user_error(target, "calling it", error) from error


def _attribute(target: str) -> Any:
    source, colon, name = target.rpartition(":")
    if not colon or not source or not name:
        raise WhatifError(f"predict: expected module:Model or file.py:Model, got {target!r}.")
    module = _import(target, source)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = ", ".join(n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, nn.Module))
            raise WhatifError(
                f"{target}: expected a name that {source} defines, got {name!r}; its modules: {known or 'none'}."
            )
        found = getattr(found, part)
    return found


def _import(target: str, source: str) -> ModuleType:
    cwd = str(Path.cwd())
    if cwd not in sys.path:  # as `python -m` does
        sys.path.insert(0, cwd)
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        path = Path(source)
        if not path.is_file():
            raise WhatifError(f"{target}: expected a Python file, got no such file {source!r}.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        # The name ends in .py: there is a loader for it.
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        sys.path.insert(0, str(path.resolve().parent))
        spec.loader.exec_module(module)
        return module
    except WhatifError:
        raise
    except ModuleNotFoundError as error:
        raise WhatifError(
            f"{target}: expected a module that can be imported from here, got none called {error.name!r}; "
            "run it in the folder of your model, or name its file as file.py:Model."
        ) from error
    except Exception as error:
        raise _user_error(target, "importing it", error) from error


def _user_error(target: str, step: str, error: Exception) -> WhatifError:
    text = " ".join(str(error).split())[:300]
    return WhatifError(f"{target}: {step} failed with {type(error).__name__}: {text.rstrip('.')}; --debug shows where.")
