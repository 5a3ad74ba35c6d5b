"""What ``--lora`` asks for: "r=16,targets=q_proj+v_proj,dropout=0.05"."""

from __future__ import annotations

import re

from msgspec import Struct

from whatif.runtime.errors import WhatifError

# As a name of a target, PEFT's: every linear layer but the output's.
ALL_LINEAR = "all-linear"


class Lora(Struct, frozen=True):
    """Adapters of ``rank`` on the linear layers whose names end in one of ``targets``; none: the model's usual ones."""

    rank: int
    targets: tuple[str, ...] = ()
    dropout: float = 0.0


def lora_of(spelled: str) -> Lora:
    """Return what the option asks for. Raises WhatifError, one sentence, where it is spelled wrongly."""
    options = dict(part.partition("=")[::2] for part in spelled.split(","))
    rank, targets, dropout = options.pop("r", ""), options.pop("targets", ""), options.pop("dropout", "0")
    sound = re.fullmatch(r"[1-9]\d{0,4}", rank, re.ASCII) and re.fullmatch(r"0|0?\.\d+", dropout, re.ASCII)
    if options or not sound:
        raise WhatifError(
            f"predict: expected --lora r=16[,targets=q_proj+v_proj][,dropout=0.05], got {spelled!r}; r is a whole "
            "number above 0, dropout a share below 1."
        )
    return Lora(int(rank), tuple(filter(None, targets.split("+"))), float(dropout))
