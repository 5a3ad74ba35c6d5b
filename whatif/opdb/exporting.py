"""Export measurements as a CSV table; `import csv` reads it back."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from whatif.graph.described import FAMILIES
from whatif.opdb.merging import is_chosen
from whatif.opdb.provenance import Provenance
from whatif.opdb.rows import Rows
from whatif.opdb.schema import LAUNCHES, TEXTS, TIMES
from whatif.opdb.store import Store
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import replaceable_file, replacing


def export_csv(store: Store, target: Path, *, device: str | None = None, family: str | None = None) -> int:
    """Write the measurements of one family to ``target``; returns their number.

    Of the provenance the device, the method, the framework's name and the contribution's id are written. Raises
    WhatifError if none or several families match.
    """
    replaceable_file(target, "table of this command", lambda start: start.startswith(b"device,family,"))
    contributions, _ = store.contributions()
    chosen = [c for c in contributions if is_chosen(c.provenance, device, family)]
    families = sorted({c.provenance.family for c in chosen})
    if len(families) != 1:
        raise WhatifError(
            f"{store.folder}: expected measurements of one family for a table, got {', '.join(families) or 'none'}; "
            f"choose with --family ({', '.join(FAMILIES)})."
        )
    table = pd.concat([_table(c.read(), c.provenance) for c in chosen], ignore_index=True)
    with replacing(target) as part:
        table.to_csv(part, index=False)
    return len(table)


def _table(rows: Rows, provenance: Provenance) -> pd.DataFrame:
    columns: dict[str, object] = {"device": provenance.origin.device.name, "family": rows.family}
    columns |= {name: rows.ops.texts[name].decoded() for name in TEXTS}
    columns |= {name: rows.ops.integers[name] for name in FAMILIES[rows.family].attributes}
    columns |= {name: getattr(rows, name) for name in TIMES}
    columns |= {"repeats": rows.repeats, "kernels": rows.kernels.decoded()}
    method = provenance.origin.method
    columns |= {"method": method.name, "launch": LAUNCHES[method.includes_launch], "cache": method.cache}
    columns |= {"framework": provenance.origin.environment.framework or "", "contribution": provenance.contribution}
    return pd.DataFrame(columns)
