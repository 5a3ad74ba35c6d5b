"""Find, check and load a transform script, and set its options from text.

A transform is a module with ``transform(graph, *, ...) -> TaskGraph`` and optionally ``schedule(frontier)``.
It is a built-in name, a path to a ``.py`` file, or an entry point in the group ``whatif.transforms``. A user's script
runs only when its user names it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whatif.prediction.plug_ins import find_plug_in, plug_ins
from whatif.runtime.errors import WhatifError, closest
from whatif.units import QUANTITIES

if TYPE_CHECKING:
    from whatif.graph.task_graph import TaskGraph
    from whatif.simulation.simulator import Schedule

# Imported by name at run time: the library never depends on the scripts that use it.
BUILT_IN_PACKAGE = "whatif.transforms"
# Frequently requested changes whose predictions could not be validated.
NO_TRUTH = {
    **dict.fromkeys(("expert_parallel", "expert", "ep", "moe"), "expert parallelism"),
    **dict.fromkeys(("context_parallel", "context", "cp", "ring_attention", "ulysses"), "context parallelism"),
}

# A comma ends an option only if another option follows, so regular expressions may contain commas.
_NEXT_OPTION = re.compile(r",(?=[A-Za-z_]\w*=)")


# The axes along which a script splits a step or repeats passes, the innermost first, in the order of application.
AXIS, AXES = "AXIS", ("tensor", "passes", "pipeline", "data")

# The places of scripts in the order of application, an axis in the place of its name. Scripts with neither stay after
# those named before them.
PLACE, PLACES = "PLACE", (
    "device",  # the GPU, whose units and rates all others use
    "batch",
    "formats",  # of numbers
    "layouts",  # of images, in those formats
    "kernels",  # the kernels of a pass
    "maps",  # feature maps between the passes
    "compiler",
    "casts",  # next to compiled code
    "update",
    "backward",  # other work inside that pass
    *AXES[:2],
    "waits",  # of the CPU inside a step
    *AXES[2:],
    "sums",  # the exchange of gradients
    "launches",
    "loading",
    "network",
    "paces",  # of the workers
    "sharing",  # of the device and the links
    "host",  # the host, which also runs what others add
)  # fmt: skip
# These apply to the work of all workers, but need the operators of a pass: it is one task once this axis is applied.
LATE, WHOLE = ("launches", "loading"), "pipeline"

# Options of built-in scripts that set the samples of a pass, whatever its batch was before.
SETTING_BATCH = {"batch_size": "size", "pipeline": "micro_batch"}
# Built-in scripts whose option ``workers`` is a number of processes that load data, not of machines.
LOADERS = ("data_loading",)

# A script that sets this sees all ranks of a graph at once; any other gets one rank after the other.
ACROSS_RANKS = "ACROSS_RANKS"

# A built-in script that sets this, or has an outer axis, accepts steps whose passes are one task each; any other looks
# into passes.
WHOLE_PASSES = "WHOLE_PASSES"

# Types whose values can be written as text.
_TEXT_KINDS = (bool, int, float, str, Path, *QUANTITIES)


@dataclass(frozen=True)
class Transform:
    """A loaded transform script with its options."""

    name: str
    summary: str
    doc: str
    function: Callable[..., TaskGraph]
    schedule: Schedule | None = None
    options: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The options that the script takes: its keyword-only parameters, by name."""
        signature = inspect.signature(self.function, eval_str=True)
        return {p.name: p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}

    @property
    def axis(self) -> int:
        """The place in ``AXES`` of the workers that the script adds; -1 if it adds none.

        Raises WhatifError if the script names another axis.
        """
        axis = self._script.get(AXIS)
        if axis is not None and axis not in AXES:
            raise WhatifError(f"transform {self.name!r}: expected AXIS to be one of {', '.join(AXES)}, got {axis!r}.")
        return -1 if axis is None else AXES.index(axis)

    @property
    def place(self) -> str | None:
        """The script's place among ``PLACES``, if it has one. Raises WhatifError if a file names another."""
        place = self._script.get(PLACE)
        if place not in PLACES:
            if place is not None and self.source:
                raise WhatifError(
                    f"transform {self.name!r}: expected PLACE to be one of {', '.join(PLACES)}, got {place!r}."
                )
            place = None  # in a notebook the name may mean something else
        return AXES[self.axis] if place is None and self.axis >= 0 else place

    @property
    def _script(self) -> dict[str, Any]:
        """The script's module-level names; empty if the transform is a callable object."""
        return getattr(self.function, "__globals__", {})

    def with_options(self, options: Mapping[str, Any]) -> Transform:
        """Return this transform with options set; text is converted to each option's type.

        Raises WhatifError on an unknown option or a value that does not fit.
        """
        known = self.parameters
        values = {}
        for name, value in options.items():
            if name not in known:
                hint = closest(name, known, f"it takes: {', '.join(known) or 'no options'}.")
                raise WhatifError(f"transform {self.name!r}: there is no option {name!r}; {hint}")
            values[name] = _converted(self.name, name, value, known[name].annotation)
        return replace(self, options={**self.options, **values})

    def __call__(self, graph: TaskGraph) -> TaskGraph:
        """Return the transformed graph. Raises WhatifError if the script fails or does not return a graph."""
        from whatif.graph.task_graph import TaskGraph

        try:
            result = self._run(graph)
        except WhatifError:
            raise
        except (Exception, SystemExit) as error:
            raise WhatifError(
                f"transform {self.name!r} ({self.source or 'a function'}) failed: {type(error).__name__}: {error}; "
                "--debug shows where."
            ) from error
        if not isinstance(result, TaskGraph):
            raise WhatifError(
                f"transform {self.name!r}: expected transform() to return a TaskGraph, got {type(result).__name__}; "
                # ``insert`` returns the graph with more.
                + ("return its .graph." if hasattr(result, "graph")
                   else "every edit returns a new graph, so return the last one.")
            )  # fmt: skip
        return result

    def _run(self, graph: TaskGraph) -> TaskGraph:
        """Call the function, once for each rank if there are several: scripts are written for one."""
        script = self._script
        built_in = script.get("__name__", "").startswith(BUILT_IN_PACKAGE)
        if built_in and self.axis < AXES.index("pipeline") and not script.get(WHOLE_PASSES):
            _check_operators(graph, self.name)
        if not graph.info.ranks or script.get(ACROSS_RANKS):
            return self.function(graph, **self.options)
        from whatif.ingest.ranks.merge import rank_by_rank

        return rank_by_rank(graph, lambda rank: self.function(rank, **self.options))


def _check_operators(graph: TaskGraph, name: str) -> None:
    """Raise WhatifError if each pass of the steps is one task; the what-if ``name`` needs their operators."""
    from whatif.graph.types import Change

    maker = {Change.IN_STAGES: "pipeline", Change.ON_SEVERAL_PROCESSORS: "dts"}
    for change in graph.info.changes:
        if change in maker:
            raise WhatifError(
                f"{name}: expected steps of operators and kernels, got those that {maker[change]} made, in which each "
                f"pass is one task; name {name} before {maker[change]}."
            )


def load_transform(spec: str | Path, **options: Any) -> Transform:
    """Return the transform that ``spec`` names: ``amp``, ``scale:kind=gpu,factor=0.5``, ``./mine.py:rate=2``.

    Raises WhatifError if there is none, if the script does not have the required shape (the message shows its
    signature), or if an option does not fit.
    """
    name, text_options = parse_spec(str(spec))
    return _found(name).with_options({**text_options, **options})


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split ``name:option=value,option=value`` into the name and its options, values as text."""
    name, found, rest = spec.partition(":")
    # A drive letter is no name: C:\\mine.py:rate=2.
    if found and len(name) == 1 and rest[:1] in ("\\", "/"):
        path, found, tail = rest.partition(":")
        name, rest = f"{name}:{path}", tail
    options: dict[str, str] = {}
    if not found:
        return name, options
    for part in _NEXT_OPTION.split(rest):
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier():
            raise WhatifError(f"{spec!r}: expected options as name:option=value,option=value, got {part!r}.")
        if key in options:
            raise WhatifError(f"{spec!r}: option {key!r} is given twice.")
        options[key] = value
    return name, options


@cache
def built_in_names() -> tuple[str, ...]:
    """Return the names of the transforms that come with the package, sorted."""
    package = importlib.import_module(BUILT_IN_PACKAGE)
    return tuple(sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")))


def built_in_summaries() -> Iterator[tuple[str, str, str]]:
    """Yield name, summary and path of each built-in transform, read from its text: importing them all takes 0.3 s."""
    folder = Path(importlib.import_module(BUILT_IN_PACKAGE).__path__[0])
    for name in built_in_names():
        path = folder / f"{name}.py"
        yield name, _docstring_of(path.read_bytes()).partition("\n")[0], str(path)


def plug_in_names() -> list[str]:
    """Return the names of the transforms that other packages offer, sorted; built-ins take precedence."""
    return sorted({plug_in.name for plug_in in plug_ins()} - set(built_in_names()))


def _found(name: str) -> Transform:
    """The transform ``name`` with its defaults: a file, else a built-in, else a plug-in."""
    if name.endswith(".py") or "/" in name or "\\" in name:
        return _checked(name, _load_file(name))
    if name in built_in_names():
        return _checked(name, importlib.import_module(f"{BUILT_IN_PACKAGE}.{name}"))
    plug_in = find_plug_in(name)
    if plug_in is not None:
        try:
            return _checked(name, plug_in.load())
        except WhatifError as error:
            reason = str(error).rstrip(".")
            raise WhatifError(
                f"transform {name!r} of the package {plug_in.package!r}: {reason}; update or uninstall the package."
            ) from error
    if name in NO_TRUTH:
        raise WhatifError(
            f"{name}: {NO_TRUTH[name]} is not modelled, since no measurements of it are at hand; "
            "tensor_parallel, pipeline, distributed, zero and fsdp are."
        )
    known = [*built_in_names(), *plug_in_names()]
    hint = closest(name, known, "see `whatif transforms`, or give the path of a .py file.")
    if {part.partition(":")[0] for part in name.split("+")} <= {*known}:
        hint = f"to combine them, write {name.replace('+', ' ')}."
    raise WhatifError(f"there is no transform {name!r}; {hint}")


def _load_file(name: str) -> types.ModuleType:
    path = Path(name)
    if not path.is_file():
        raise WhatifError(f"{name}: expected the path of a transform script, got no such file.")
    spec = importlib.util.spec_from_file_location(f"whatif_user_transform_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise WhatifError(f"{name}: expected a transform script, whose name ends in .py, got another file.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise WhatifError(f"{path}: the transform script could not be run: {type(error).__name__}: {error}") from error
    return module


def _docstring_of(source: str | bytes) -> str:
    """The docstring of a module's text, also under -OO, where `ast.parse` of Python 3.14 leaves it out."""
    tree = compile(source, "<transform>", "exec", ast.PyCF_ONLY_AST, dont_inherit=True, optimize=0)
    assert isinstance(tree, ast.Module)
    return ast.get_docstring(tree) or ""


def _docstring(module: types.ModuleType) -> str:
    """The module's docstring; from its source if the interpreter drops docstrings (-OO)."""
    if module.__doc__ is not None:
        return inspect.cleandoc(module.__doc__)
    try:
        return _docstring_of(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):  # no source
        return ""


def _checked(name: str, module: types.ModuleType) -> Transform:
    where = getattr(module, "__file__", None) or name
    function = getattr(module, "transform", None)
    if not callable(function):
        raise WhatifError(f"{where}: expected a function transform(graph, *, options) -> TaskGraph, found none.")
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception as error:  # annotations in text are evaluated and may raise anything
        raise WhatifError(f"{where}: the annotations of transform() cannot be read: {error}") from None
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    options = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    shaped = len(positional) == 1 and len(options) + 1 == len(parameters)
    complete = all(p.default is not p.empty and p.annotation is not p.empty for p in options)
    if not (shaped and complete):
        raise WhatifError(
            f"{where}: expected transform(graph, *, option: type = default, ...), got transform{signature}; "
            "options are keyword-only, annotated and have defaults."
        )
    for option in options:
        _check_option(where, signature, option)
    schedule = getattr(module, "schedule", None)
    if schedule is not None and (not callable(schedule) or len(inspect.signature(schedule).parameters) != 1):
        raise WhatifError(f"{where}: expected schedule(frontier) -> int, got {_shape('schedule', schedule)}.")
    priority = getattr(module, "priority", None)
    if priority is not None:
        if schedule is not None or not callable(priority) or len(inspect.signature(priority).parameters) != 1:
            got = "schedule(frontier) as well" if schedule is not None else _shape("priority", priority)
            raise WhatifError(f"{where}: expected priority(graph) -> array and no schedule, got {got}.")
        from whatif.simulation.simulator import ByPriority

        schedule = ByPriority(priority)
    doc = _docstring(module)
    if not doc:
        raise WhatifError(f"{where}: expected a docstring whose first line says what the transform models, found none.")
    short = Path(name).stem if name.endswith(".py") else name
    return Transform(short, doc.splitlines()[0], doc, function, schedule, source=where)


def _shape(name: str, found: object) -> str:
    """The signature of a script's function, or its value if it is no function."""
    return f"{name}{inspect.signature(found)}" if callable(found) else f"{name} = {found!r}"


def _check_option(where: str, signature: inspect.Signature, option: inspect.Parameter) -> None:
    """Raise WhatifError if no text can be converted to the option's type, or if its default has another type."""
    kinds = _alternatives(option.annotation)
    if not any(kind in _TEXT_KINDS or typing.get_origin(kind) is typing.Literal for kind in kinds):
        raise WhatifError(
            f"{where}: expected option {option.name!r} of type int, float, bool, str, Path, Bandwidth, Size or "
            f"Literal, got transform{signature}; an option's value has to be written on a command line."
        )
    if not any(_is_of(option.default, kind) for kind in kinds):
        raise WhatifError(
            f"{where}: expected a default of the option's own type, got {option.name}={option.default!r} in "
            f"transform{signature}."
        )


def _is_of(value: Any, kind: Any) -> bool:
    if kind is None:
        return value is None
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if kind in (int, float) and isinstance(value, bool):
        return False
    # A type that is no class cannot be checked here.
    return isinstance(value, int | float if kind is float else kind) if isinstance(kind, type) else True


def _converted(transform: str, option: str, value: Any, annotation: Any) -> Any:
    """An option's value from text, by its annotation; other values stay unchanged."""
    choices = _alternatives(annotation)
    quantity = next((kind for kind in choices if kind in QUANTITIES), None)
    if quantity is not None and not any(_is_of(value, kind) for kind in choices):
        value = str(value)  # a bare number, which the quantity rejects
    if not isinstance(value, str):
        return value
    if type(None) in choices and value.lower() in ("none", ""):
        return None
    for kind in (c for c in choices if c is not type(None)):
        if typing.get_origin(kind) is typing.Literal:
            allowed = [str(a) for a in typing.get_args(kind)]
            if value in allowed:
                return typing.get_args(kind)[allowed.index(value)]
            raise WhatifError(f"{transform}:{option}: expected one of {', '.join(allowed)}, got {value!r}.")
        if kind is bool:
            if value.lower() in ("true", "yes", "on", "1"):
                return True
            if value.lower() in ("false", "no", "off", "0"):
                return False
        elif kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                pass
        elif kind in (str, Path):
            return kind(value)
        elif kind in QUANTITIES:
            try:
                return kind(value)
            except WhatifError as error:
                raise WhatifError(f"{transform}:{option}: {error}") from None
    names = " or ".join(getattr(c, "__name__", str(c)) for c in choices if c is not type(None))
    raise WhatifError(f"{transform}:{option}: expected {names}, got {value!r}.")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)
