"""Programs that start training processes: `torchrun`, `accelerate launch`. Each process then records itself."""

import sys
from typing import Any

from whatif.runtime.errors import WhatifError

# What `whatif collect` may be asked to run, besides a script; after `-m` the modules of the same programs.
_LAUNCHERS = {
    "torchrun": "torch.distributed.run",
    "torch.distributed.run": "torch.distributed.run",
    "accelerate": "accelerate.commands.launch",
    "accelerate.commands.launch": "accelerate.commands.launch",
}


def launched(name: str, words: list[str], options: list[str]) -> list[str] | None:
    """Return the command that starts the same processes, each under `whatif collect` with `options`.

    `words` follow the launcher's name on the command line. Returns None where `name` is no launcher. Raises WhatifError
    where the processes would not run Python.
    """
    module = _LAUNCHERS.get(name)
    if module is None:
        return None
    if name == "accelerate":
        if words[:1] != ["launch"]:
            raise WhatifError("accelerate: expected `accelerate launch SCRIPT.py`, got another command of it.")
        words = words[1:]
    told = _parser(module).parse_args(words)
    if getattr(told, "no_python", False):
        raise WhatifError(f"{name}: expected Python scripts to start, got --no-python: drop it.")
    script = len(words) - len(told.training_script_args) - 1
    its_options, its_words = words[:script], words[script:]
    as_module = ["-m"] if told.module else []
    if not told.module:  # whatif itself is a module.
        its_options = [*its_options, "-m"]
    return [sys.executable, "-m", module, *its_options, "whatif", "collect", *options, *as_module, *its_words]


def _parser(module: str) -> Any:
    if module == "torch.distributed.run":
        from torch.distributed.run import get_args_parser

        return get_args_parser()
    try:
        from accelerate.commands.launch import launch_command_parser
    except ModuleNotFoundError:
        raise WhatifError("accelerate: expected the package accelerate, got none: `pip install accelerate`.") from None
    return launch_command_parser()
