"""``whatif cache``: cached graphs of recordings that were read before."""

from __future__ import annotations

import argparse
from typing import Any

from whatif.cli.options import add_json
from whatif.cli.reading import show
from whatif.units import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif cache``."""
    parser.add_argument("--clear", action="store_true", help="empty the cache")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the folder and the size of the cache, after clearing it if asked."""
    from whatif.ingest import kept

    folder = kept.cache_folder()
    before = kept.contents()
    if args.clear:
        kept.clear()
    after = kept.contents() if args.clear else before
    found: dict[str, Any] = {
        "folder": None if folder is None else str(folder),
        "recordings": len(after),
        "size_bytes": sum(size_bytes for _, size_bytes, _ in after),
        "most_bytes": kept.MOST_BYTES,
        "removed": len(before) - len(after),
    }

    def print_text() -> None:
        from whatif.report.printable import printable

        if folder is None:
            print(f"caching is off: {kept.CACHE_VARIABLE} is empty")
            return
        if args.clear:
            print(f"{found['removed']} removed")
        size_mb, most_mb = found["size_bytes"] / 1e6, kept.MOST_BYTES / 1e6
        print(
            f"{printable(str(folder))}: {counted(len(after), 'recording')}, {size_mb:,.1f} of at most {most_mb:,.0f} MB"
        )

    return show(args, lambda: found, print_text)
