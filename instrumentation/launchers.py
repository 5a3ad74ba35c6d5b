"""Programs that start training processes: `torchrun`, `accelerate launch`. Each process then records itself."""

import sys
from typing import Any

from whatif.runtime.errors import WhatifError

# What `whatif collect` accepts besides a script: the programs and, after `-m`, their modules.
_LAUNCHERS = {
    "torchrun": "torch.distributed.run",
    "torch.distributed.run": "torch.distributed.run",
    "accelerate": "accelerate.commands.launch",
    "accelerate.commands.launch": "accelerate.commands.launch",
}


def launched(name: str, words: list[str], options: list[str]) -> list[str] | None:
    """Return the command that starts the same processes, each under `whatif collect` with `options`.

    `words` follow the launcher's name on the command line. Returns None if `name` is not a launcher. Raises WhatifError
    if the processes would not run Python.
    """
    module = _LAUNCHERS.get(name)
    if module is None:
        return None
    if name == "accelerate":
        if words[:1] != ["launch"]:
            raise WhatifError("accelerate: expected `accelerate launch SCRIPT.py`, got another accelerate command.")
        words = words[1:]
    parsed = _parser(module).parse_args(words)
    if getattr(parsed, "no_python", False):
        raise WhatifError(f"{name}: expected Python scripts to start, got --no-python: drop it.")
    script = len(words) - len(parsed.training_script_args) - 1
    launcher_options, script_words = words[:script], words[script:]
    as_module = ["-m"] if parsed.module else []
    if not parsed.module:  # whatif itself is a module.
        launcher_options = [*launcher_options, "-m"]
    return [sys.executable, "-m", module, *launcher_options, "whatif", "collect", *options, *as_module, *script_words]


def _parser(module: str) -> Any:
    if module == "torch.distributed.run":
        from torch.distributed.run import get_args_parser

        return get_args_parser()
    try:
        from accelerate.commands.launch import launch_command_parser
    except ModuleNotFoundError:
        raise WhatifError("accelerate: expected the package accelerate, got none: `pip install accelerate`.") from None
    return launch_command_parser()
