"""``whatif demo``: a recording that ships with the package, written here with its report."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from whatif.runtime.errors import WhatifError

# Files of `traces/`, the description of each, and the what-if to try on it. pyproject.toml lists the same files.
SHIPPED = {
    "gpu": ("predicted/resnet50_a100_predicted.json.gz", "ResNet-50 on an A100, predicted, not recorded", "amp"),
    "cpu": ("transformer_cpu.json.gz", "a small transformer, recorded on one CPU core", "fused_adam"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif demo``."""
    shown = "; ".join(f"{name}: {description}" for name, (_, description, _) in SHIPPED.items())
    parser.add_argument("name", nargs="?", default="gpu", choices=tuple(SHIPPED), help=f"which step to write ({shown})")
    parser.add_argument("-o", "--output", default=".", metavar="FOLDER", help="where to write (default: this folder)")
    parser.add_argument("--no-browser", action="store_true", help="do not open the report in a browser")


def run(args: argparse.Namespace) -> int:
    """Write the recording and its report, print the verdict, and open the report if a browser is available."""
    import gzip

    from whatif.cli import report
    from whatif.cli.main import parser_of
    from whatif.report.printable import printable
    from whatif.runtime.files import START_BYTES, file_beside, replaceable_file, replacing

    shipped, description, what_if = SHIPPED[args.name]
    source = _folder_of_traces() / shipped
    trace = os.path.join(args.output, source.name) if args.output != "." else source.name
    page = trace.removesuffix(".json.gz") + ".html"
    shipped_start = gzip.decompress(source.read_bytes())[:START_BYTES]
    file_beside(trace, source)
    replaceable_file(trace, "copy of the demo", lambda start: start == shipped_start)
    with replacing(trace) as part:
        part.write_bytes(source.read_bytes())
    print(f"{printable(trace)}: {description}\n")
    status = report.run(parser_of("report", report).parse_args([trace, "-o", page]))
    print(f"\nTry next:\n  whatif explain {printable(trace)}\n  whatif apply {what_if} {printable(trace)}")
    if not args.no_browser and _has_browser():
        import webbrowser

        webbrowser.open(Path(page).absolute().as_uri())
    return status


def _folder_of_traces() -> Path:
    """The folder of the recordings: in the installed package, or in the clone that it is imported from."""
    package = Path(__file__).parents[1]
    for folder in (package / "traces", package.parent / "traces"):
        if folder.is_dir():
            return folder
    raise WhatifError("expected the recordings that ship with whatif, got none; install it again with pip.")


def _has_browser() -> bool:
    """Whether a window can open: somebody is at a terminal with a display."""
    has_display = sys.platform in ("win32", "darwin") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return sys.stdout.isatty() and has_display
