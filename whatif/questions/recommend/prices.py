"""Hourly prices of devices: a TOML file of the user's, as no price holds for everybody."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from whatif.hardware.gpu import gpu_asked_for
from whatif.runtime.errors import WhatifError

_LARGEST_FILE_BYTES = 1_000_000
_MOST_AN_HOUR = 1e6
_LONGEST_CURRENCY = 12


class Prices(Struct, frozen=True):
    """Price of one device for an hour, by its name in ``whatif/hardware/gpus``, in ``currency``."""

    currency: str
    per_hour: Mapping[str, float]

    def of(self, device: str, duration_s: float) -> float | None:
        """Return the cost of ``duration_s`` on a device; None if the file has no price of it."""
        price = self.per_hour.get(device)
        return None if price is None else price * duration_s / 3600


def read_prices(path: str | Path) -> Prices:
    """Read ``currency = "EUR"`` and a table ``[per_hour]`` of devices and numbers.

    Raises WhatifError, with the place in the file, if it cannot be read, names an unknown device, or has an invalid
    price.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
        if len(content) > _LARGEST_FILE_BYTES:
            raise WhatifError(f"{path}: expected a file of prices of at most 1 MB, got a larger one.")
        document = tomllib.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise WhatifError(f"{path}: expected a file of prices, got {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise WhatifError(f"{path}: expected a file of prices (TOML), got one that is no text.") from error
    except (ValueError, RecursionError) as error:
        raise WhatifError(f"{path}: expected a file of prices (TOML), got an error: {str(error)[:120]}.") from error
    return parse_prices(document, str(path))


def parse_prices(document: Mapping[str, Any], path: str) -> Prices:
    """Return the prices of a decoded TOML file; ``path`` is what errors call it."""
    currency, table = document.get("currency", ""), document.get("per_hour")
    if unknown := sorted(document.keys() - {"currency", "per_hour"}):
        raise WhatifError(f"{path}: expected currency and [per_hour], got {unknown[0]!r}.")
    if not isinstance(currency, str) or len(currency) > _LONGEST_CURRENCY or not currency.isprintable():
        raise WhatifError(f'{path}: expected currency as a short text, as in currency = "EUR".')
    if not isinstance(table, dict) or not table:
        raise WhatifError(f'{path}: expected a table [per_hour] with lines as "A100-SXM-80" = 1.80, got none.')
    per_hour: dict[str, float] = {}
    for device, price in table.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price <= _MOST_AN_HOUR:
            raise WhatifError(f"{path}: per_hour.{device}: expected a price above 0, got {price!r}.")
        try:
            name = gpu_asked_for(device).name
        except WhatifError as error:
            raise WhatifError(f"{path}: per_hour: {error}") from None
        if name in per_hour:
            raise WhatifError(f"{path}: per_hour: expected each device once, got {name} twice.")
        per_hour[name] = float(price)
    return Prices(currency, per_hour)
