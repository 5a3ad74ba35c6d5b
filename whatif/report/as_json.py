"""One JSON object on stdout."""

from __future__ import annotations

import json
import math
from typing import Any


def print_json(report: dict[str, Any]) -> None:
    """Print ``report`` as one JSON object: plain ASCII, with null for numbers that are not finite."""
    print(json.dumps(finite(report), indent=2, allow_nan=False))


def finite(value: Any) -> Any:
    """Return a JSON value with null in place of every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
