"""Training data of a model: measured operators of one family and dtype, taken with one method."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from whatif.graph.types import Float64
from whatif.hardware.gpu import Gpu
from whatif.opdb import devices
from whatif.opdb.features import LEARNABLE, Sheet, features, reference_s, sheet_of
from whatif.opdb.keys import held_out
from whatif.opdb.linear_model import fit_linear_model
from whatif.opdb.provenance import Basis, Provenance
from whatif.opdb.quarantine import Aside, set_aside
from whatif.opdb.rows import Operators, Rows, joined
from whatif.opdb.work import work

# A CPU, or a GPU without a data sheet, counts as one SM; its L2 cache is our estimate, its rates are fitted.
_UNKNOWN_CACHE_MBYTE = 32.0


@dataclass(frozen=True, order=True)
class Kind:
    """The properties that all rows of a sample share."""

    family: str
    dtype: str
    phase: str
    basis: Basis


@dataclass(frozen=True)
class Sample:
    """Measurements of one kind on one device; ``sound``, shape (n,), masks those that pass the quarantine."""

    device: str
    kind: Kind
    ops: Operators
    t_s: Float64
    sound: npt.NDArray[np.bool_]
    provenances: tuple[Provenance, ...]
    sheet: Sheet
    gpu: Gpu | None

    def __len__(self) -> int:
        return len(self.t_s)

    @property
    def launch(self) -> bool:
        """Whether its times include a launch."""
        return self.kind.basis.has_launch

    @property
    def names(self) -> npt.NDArray[np.str_]:
        """The operators' names, shape (n,)."""
        column = self.ops.texts["name"]
        return np.array(column.table or ("",))[column.codes]

    def take(self, rows: npt.NDArray[np.bool_]) -> Sample:
        """Return the measurements under a mask."""
        return replace(self, ops=self.ops.take(rows), t_s=self.t_s[rows], sound=self.sound[rows])

    def drawn(self, most: int, seed: int) -> Sample:
        """Return about ``most`` measurements at most, drawn by the operators' keys: the same ones on every device."""
        share = most / max(len(self), 1)
        return self if share >= 1 else self.take(held_out(self.ops.keys, seed, share))

    def features(self, names: Sequence[str], *, across: bool) -> tuple[Float64, tuple[str, ...]]:
        """Return the model's inputs, shape (n, f), and the names of the features."""
        return features(self.ops, self.sheet, names, across=across)

    def target(self) -> Float64:
        """Return the model's target: log of the time over the reference time, shape (n,)."""
        return np.asarray(np.log(self.t_s / reference_s(self.ops, self.sheet, launch=self.launch)))

    def sha256(self) -> str:
        """Return a hash of the operators and their times."""
        order = np.lexsort((self.t_s, self.ops.keys))
        digest = hashlib.sha256(self.device.encode())
        digest.update(self.ops.keys[order].astype("<u8").tobytes())
        digest.update(self.t_s[order].astype("<f8").tobytes())
        return digest.hexdigest()


def samples_of(contributions: Sequence[tuple[Provenance, Rows]]) -> Iterator[Sample]:
    """Return the samples of a database, by device and kind."""
    parts: dict[tuple[str, Kind], list[tuple[Provenance, Operators, Float64]]] = {}
    for provenance, rows in contributions:
        if rows.family not in LEARNABLE:
            continue
        dtypes, phases = (rows.ops.texts[name] for name in ("dtype", "phase"))
        pairs = np.stack([dtypes.codes, phases.codes], axis=1)
        for dtype, phase in np.unique(pairs, axis=0).tolist():
            chosen = (dtypes.codes == dtype) & (phases.codes == phase)
            kind = Kind(rows.family, dtypes.table[dtype], phases.table[phase], provenance.origin.basis)
            part = parts.setdefault((provenance.origin.device.name, kind), [])
            part.append((provenance, rows.ops.take(chosen), rows.t_s[chosen]))
    for (device, kind), found in sorted(parts.items(), key=lambda item: item[0]):
        yield _sample(device, kind, found)


def _sample(device: str, kind: Kind, parts: list[tuple[Provenance, Operators, Float64]]) -> Sample:
    ops = joined([part for _, part, _ in parts])
    t_s = np.concatenate([t for _, _, t in parts])
    order = np.lexsort((t_s, ops.keys))
    ops, t_s = ops.take(order), t_s[order]
    gpu = devices.facts(device)
    _, group = np.unique(ops.group_keys, return_inverse=True)
    count = int(group.max()) + 1
    aside = set_aside(ops, t_s, group.reshape(-1), [gpu] * count, [kind.basis.cache == "cold"] * count)
    sheet = sheet_of(gpu, kind.family) if gpu is not None else _fitted_sheet(ops, t_s, kind.dtype)
    return Sample(device, kind, ops, t_s, aside == Aside.SOUND, tuple(p for p, _, _ in parts), sheet, gpu)


def _fitted_sheet(ops: Operators, t_s: Float64, dtype: str) -> Sheet:
    """Return the rates of a device without a data sheet, fitted to its times."""
    fitted = fit_linear_model(*work(ops), t_s)
    rate = fitted.flops_per_s / 1e12 if np.isfinite(fitted.flops_per_s) else 1.0
    bandwidth = fitted.bytes_per_s / 1e9 if np.isfinite(fitted.bytes_per_s) else 1.0
    return Sheet(
        sm_count=1.0, tflops={"fp32": rate, dtype: rate}, memory_gbyte_s=bandwidth, l2_mbyte=_UNKNOWN_CACHE_MBYTE
    )
