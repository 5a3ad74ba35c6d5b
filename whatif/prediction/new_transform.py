"""A template for a transform: a working script with comments on what to change."""

from __future__ import annotations

import keyword
import sys
from pathlib import Path

from whatif.prediction.transform import built_in_names
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import output_file

# A file of such a name would shadow the Python module.
TAKEN = sys.stdlib_module_names | {"whatif", "numpy"}

# Lines of at most 88 characters, the default of linters.
TEMPLATE = '''\
"""{title}: what if element-wise work were `speedup` times as fast?

Source: where the idea comes from: a paper and its section, or your own measurement.
Model:  what is assumed and what is left out. Here: the element-wise kernels (operators,
        on a CPU) take 1 / `speedup` of their time; the range runs from no gain at all
        to twice the gain. Work that overlaps with them keeps its time.
Effort: medium: one sentence on how to do it in practice (none: a hypothetical question).
"""

from whatif import TaskGraph, WhatifError
from whatif.models import KernelFamily

NAME = "{name}"


# Every keyword-only parameter is an option:
# whatif apply {file}:speedup=3 TRACE
def transform(graph: TaskGraph, *, speedup: float = 2.0, layer: str = "") -> TaskGraph:
    """Shorten the element-wise work, in the layers that `layer` matches."""
    if not speedup >= 1:
        raise WhatifError(f"{{NAME}}: expected a speedup of 1 or more, got {{speedup}}.")

    # 1. Select. Masks have one value per task and combine with & | ~. There are columns
    #    for kind, name, thread, layer, phase, step, family, dtype, size_bytes, flops.
    tasks = graph.select(layer=layer or None)
    tasks &= graph.family == KernelFamily.ELEMENTWISE
    if not tasks.any():
        raise WhatifError(
            f"{{NAME}}: expected element-wise work in layers that match {{layer!r}}, got "
            "none; `whatif explain` lists layers and families."
        )

    # 2. Edit. Every edit returns a new graph: scale, with_duration, insert, remove, split,
    #    add_dependencies, synchronize. `low` and `high` bound an uncertain duration.
    least = max(1 - 2 * (1 - 1 / speedup), 0.0)
    graph = graph.scale(tasks, 1 / speedup, low=least, high=1.0)

    # 3. Say what was done: the report shows notes with the prediction.
    return graph.note(f"{{NAME}}: {{tasks.sum()}} tasks are {{speedup:g}} times as fast")


# A script may also choose which ready task runs next (docs/writing-a-transform.md):
#
# def schedule(frontier: Frontier) -> int:
#     return frontier.earliest()
'''


def write_new(path: str | Path) -> Path:
    """Write a working transform to ``path`` and return the path.

    Raises WhatifError if the file exists, if its name is not a valid or free module name, or if it cannot be written.
    """
    script = Path(path)
    name = script.stem
    _check_name(path, name)
    target = output_file(path)
    text = TEMPLATE.format(title=name.replace("_", " ").strip().capitalize() or name, name=name, file=script.name)
    try:
        # Created, never replaced, also in a race.
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise WhatifError(f"{path}: expected the name of a new file, got one that is there; name another.") from None
    except OSError as error:
        raise WhatifError(f"{path}: expected to write the file, got '{error.strerror or error}'.") from error
    return script


def _check_name(path: str | Path, name: str) -> None:
    if Path(path).suffix != ".py" or not name.isidentifier() or keyword.iskeyword(name):
        raise WhatifError(
            f"{path}: expected a script's name of letters, digits and _ that ends in .py, as my_idea.py, got another."
        )
    if name in TAKEN:
        raise WhatifError(f"{path}: expected a name of its own, got that of the Python module {name!r}; name another.")
    if name in built_in_names():
        raise WhatifError(f"{path}: expected a name of its own, got the built-in transform {name!r}; name another.")
