"""Commands in a notebook: ``%load_ext whatif``, then ``%whatif explain run.json.gz`` and ``%%whatif collect``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from whatif.cli.collect import COLLECTOR, MESSAGES, add_recording_options, recording_options
from whatif.cli.main import Parser, main
from whatif.cli.options import with_torch
from whatif.cli.status import UsageError


def load(shell: Any) -> None:
    """Register ``%whatif`` and ``%%whatif`` with IPython's shell."""
    shell.register_magic_function(lambda line, cell=None: run(shell, line, cell), "line_cell", "whatif")


def run(shell: Any, line: str, cell: str | None) -> None:
    """Run a command of the line, or record the steps of the cell; print errors as the command line does."""
    words = shlex.split(line)
    if cell is None:
        main(words)
    elif words[:1] == ["collect"]:
        record_cell(shell, words[1:], cell)
    else:
        print("whatif: expected `%%whatif collect [OPTIONS]` above a cell; other commands are `%whatif COMMAND ...`.")


def record_cell(shell: Any, words: list[str], cell: str) -> None:
    """Run the cell to its end in the notebook's namespace, and record the training steps in it."""
    parser = Parser(prog="%%whatif collect", allow_abbrev=False)
    add_recording_options(parser, "cell.json.gz")
    try:
        args = parser.parse_args(words)
    except UsageError as error:
        print(f"whatif: {error}")
        return
    except SystemExit:  # --help has printed
        return
    collector, messages = with_torch(COLLECTOR, "collect"), with_torch(MESSAGES, "collect")
    output = Path(args.output or "cell.json.gz")
    with collector.Collector(output, say=messages.tell, **recording_options(args)) as recorded:
        shell.run_cell(cell)
        written = recorded.finish()
    if written is None:
        messages.tell(f"no recording: {recorded.failure}")
    else:
        messages.tell(messages.recorded(written, command="%whatif"))
