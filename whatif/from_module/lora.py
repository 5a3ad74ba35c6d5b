"""The option ``--lora``: "r=16,targets=q_proj+v_proj,dropout=0.05"."""

from __future__ import annotations

import re

from msgspec import Struct

from whatif.runtime.errors import WhatifError

# PEFT's target name for every linear layer but the output's.
ALL_LINEAR = "all-linear"


class Lora(Struct, frozen=True):
    """Adapters of ``rank`` on the linear layers whose names end in one of ``targets``; empty: the model's defaults."""

    rank: int
    targets: tuple[str, ...] = ()
    dropout: float = 0.0


def lora_of(spelled: str) -> Lora:
    """Parse the option. Raises WhatifError if it is malformed."""
    options = dict(part.partition("=")[::2] for part in spelled.split(","))
    rank, targets, dropout = options.pop("r", ""), options.pop("targets", ""), options.pop("dropout", "0")
    sound = re.fullmatch(r"[1-9]\d{0,4}", rank, re.ASCII) and re.fullmatch(r"0|0?\.\d+", dropout, re.ASCII)
    if options or not sound:
        raise WhatifError(
            f"predict: expected --lora r=16[,targets=q_proj+v_proj][,dropout=0.05], got {spelled!r}; r is a whole "
            "number above 0, dropout a fraction below 1."
        )
    return Lora(int(rank), tuple(filter(None, targets.split("+"))), float(dropout))
