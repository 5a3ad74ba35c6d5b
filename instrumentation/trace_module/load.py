"""Finds and builds the model that a user names, without memory for its parameters."""

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

    The target is a module, or a class or function that returns one, alone or with example inputs, which are given
    too (else None). It is called with ``keywords``. Raises WhatifError, one sentence, on anything else.
    """
    found = _attribute(target)
    if isinstance(found, nn.Module):
        if keywords:
            raise WhatifError(f"{target}: expected a class or a function for --kwargs, got a module that is built.")
        return found.to("meta"), None
    if not callable(found):
        raise WhatifError(
            f"{target}: expected a module, or a class or function that returns one, got {type(found).__name__}."
        )
    made = _made(target, found, keywords)
    inputs = None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        made, inputs = made
    if not isinstance(made, nn.Module):
        raise WhatifError(f"{target}: expected a torch.nn.Module, alone or with its inputs, got {type(made).__name__}.")
    return made.to("meta"), inputs


def _made(target: str, found: Any, keywords: dict[str, Any]) -> Any:
    try:
        try:
            with torch.device("meta"):
                return found(**keywords)
        except RuntimeError as error:
            if "meta" not in str(error).lower():
                raise
            # Some constructors compute with numbers; they need real ones, and so much memory.
            return found(**keywords)
    except Exception as error:
        raise _user_error(target, "calling it", error) from error


def _attribute(target: str) -> Any:
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise WhatifError(f"predict: expected module:Model or file.py:Model, got {target!r}.")
    module = _import(target, where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = ", ".join(n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, nn.Module))
            raise WhatifError(
                f"{target}: expected a name that {where} defines, got {name!r}; its modules: {known or 'none'}."
            )
        found = getattr(found, part)
    return found


def _import(target: str, where: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where)
        if not path.is_file():
            raise WhatifError(f"{target}: expected a Python file, got no such file {where!r}.")
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


def _user_error(target: str, when: str, error: Exception) -> WhatifError:
    said = " ".join(str(error).split())[:300]
    return WhatifError(f"{target}: {when} failed with {type(error).__name__}: {said.rstrip('.')}; --debug shows where.")
