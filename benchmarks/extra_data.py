"""Find public recordings in the folder WHATIF_EXTRA_DATA (traces/fetch_public.py fills it)."""

from __future__ import annotations

import os
from pathlib import Path

PAIRS = Path(__file__).resolve().parent / "pairs.toml"


def extra_data(*parts: str) -> Path:
    """Return a file or folder of that data. Exits if it is missing."""
    folder = os.environ.get("WHATIF_EXTRA_DATA")
    if not folder:
        raise SystemExit("expected WHATIF_EXTRA_DATA to name a folder with public recordings: traces/fetch_public.py")
    path = Path(folder, *parts).resolve()
    if not path.exists():
        raise SystemExit(f"expected {path}, got nothing; traces/fetch_public.py brings the public recordings")
    return path


def write_pairs(folder: Path) -> Path:
    """Write ``pairs.toml`` into a folder, with the recordings' full paths, for `whatif validate`."""
    text = PAIRS.read_text(encoding="utf-8").replace('"traces/', f'"{extra_data("traces")}/')
    path = folder / PAIRS.name
    path.write_text(text, encoding="utf-8")
    return path
