"""The effort to put a what-if into practice, from the docstring of its script."""

from __future__ import annotations

import re
from enum import IntEnum

from msgspec import Struct

# The last part of a transform's docstring: "Effort: small: torch.autocast around the forward pass."
_LINE = re.compile(r"^Effort:\s*(small|medium|large|none)\s*:\s*(.+?)\s*(?:\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class EffortSize(IntEnum):
    """The work to put a what-if into practice: from none (a hypothetical question) to other software or machines."""

    UNKNOWN = -1  # the script does not say
    NONE = 0  # a hypothetical question: nothing to switch on
    SMALL = 1  # an option, or some lines
    MEDIUM = 2  # a day
    LARGE = 3  # other software or other machines


class Effort(Struct, frozen=True):
    """A size, and instructions in one sentence."""

    size: EffortSize
    how: str = ""

    @staticmethod
    def of(doc: str) -> Effort:
        """Read the effort from a docstring; its size is unknown if there is none."""
        found = _LINE.search(doc)
        if found is None:
            return Effort(EffortSize.UNKNOWN)
        return Effort(EffortSize[found[1].upper()], " ".join(found[2].split()))
