"""Learned models as files: NAME.json describes a model and its training data, NAME.npz holds its arrays.

Nothing is unpickled, and every array is checked before it is used. A model is of the kind "trees"
(``whatif.opdb.trees``) or "principal" (``whatif.opdb.networks``). Shipped models are in ``whatif/opdb/fitted``, the
user's own in the folder ``models`` of a database.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from whatif.graph.described import FAMILIES
from whatif.graph.types import Bool, Float64
from whatif.hardware.gpu import Gpu
from whatif.opdb.devices import facts as known_facts
from whatif.opdb.features import FEATURES_VERSION, LEARNABLE, Sheet, features, reference_s, sheet_of
from whatif.opdb.networks import NetworkModel, network_model_of
from whatif.opdb.provenance import Basis
from whatif.opdb.rows import Operators
from whatif.opdb.stand_ins import stand_ins
from whatif.opdb.trees import Forest, forest_of
from whatif.runtime.errors import WhatifError, expecting
from whatif.runtime.files import replacing

MODEL_VERSION = 1
# Gradient-boosted trees, and Tianshu's networks with a principal component, each for one device.
TREES, PRINCIPAL = "trees", "principal"
KINDS = (TREES, PRINCIPAL)
_LARGEST_JSON_BYTES, _LARGEST_ARRAYS_BYTES = 1_000_000, 32_000_000
_AGAIN = "; fit or fetch it again"


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of a model's training data."""

    name: str
    licence: str
    uri: str = ""
    author: str = ""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of NAME.json. ``device`` is "" for a model across devices; widths are logs, by operator name.

    ``half`` is the half-width of the nominal 90 % range inside the measured sizes, ``growth`` its increase for each
    doubling outside. ``before_interpolation`` lists the operators on which it beats an interpolation, on data
    that neither had seen. ``launch_s`` is the part of a time that is not in kernels.
    """

    version: int
    features_version: int
    kind: str
    family: str
    device: str
    names: tuple[str, ...]
    dtype: str
    phase: str = "fwd"
    layouts: tuple[str, ...] = ("",)
    basis: tuple[str, str, str, str]
    features: tuple[str, ...] = ()
    sheet: Sheet | None = None
    low: dict[str, int]  # smallest measured value of each integer of the family
    high: dict[str, int]
    half: dict[str, float]
    growth: float
    launch_s: dict[str, float] = {}
    before_interpolation: tuple[str, ...] = ()
    validation_pct: dict[str, float] = {}  # mean error on data held out from training, by name
    devices: tuple[str, ...]  # that were measured
    rows: int
    data_sha256: str  # of the training rows
    arrays_sha256: str  # of NAME.npz
    sources: tuple[Source, ...]
    settings: dict[str, float] = {}
    components: dict[str, str] = {}  # of networks: the principal component, by name

    @property
    def across(self) -> bool:
        """Whether it applies to devices that were not measured."""
        return not self.device

    @property
    def measured_as(self) -> Basis:
        """The basis of the times that it was trained on."""
        return Basis(*self.basis)

    def knows_vendor_of(self, gpu: Gpu) -> bool:
        """Whether it was trained on devices of the GPU's vendor: those of others run other libraries."""
        return any(device.vendor == gpu.vendor for device in map(known_facts, self.devices) if device is not None)


@dataclass
class LearnedModel:
    """A model whose arrays are read on first use.

    A ``shipped`` model was trained on foreign measurements: it never comes before an interpolation.
    """

    name: str
    facts: ModelFacts
    read_arrays: Callable[[], Mapping[str, npt.NDArray[Any]]]
    shipped: bool = False
    _forest: Forest | None = field(default=None, repr=False)
    _networks: NetworkModel | None = field(default=None, repr=False)

    def predict(self, ops: Operators, gpu: Gpu | None) -> Float64:
        """Return the log of the time in seconds of n covered operators, shape (n,).

        ``gpu`` is the device to predict for; a model of one device needs none. Raises WhatifError if the
        model's arrays are damaged.
        """
        facts = self.facts
        if facts.kind == PRINCIPAL:
            return self._network_model().log_time(ops)
        if self._forest is None:
            self._forest = forest_of(self.read_arrays(), len(facts.features), self.name)
        sheet = facts.sheet or (sheet_of(gpu, facts.family) if gpu is not None else None)
        if sheet is None:
            raise WhatifError(f"{self.name}: expected a device with a data sheet, got one without.")
        x, called = features(ops, sheet, facts.names, across=facts.across)
        if called != facts.features:
            raise WhatifError(f"{self.name}: expected a model with this version's features, got others; fit it again.")
        launch = facts.measured_as.has_launch
        return np.asarray(self._forest.predict(x) + np.log(reference_s(ops, sheet, launch=launch)))

    def covers(self, ops: Operators) -> tuple[Bool, Operators, Float64]:
        """Map n operators to those that the model was trained on.

        Returns a mask of those it covers (n,), the mapped operators, and logs to add to the half-width, shape (n,).
        """
        facts = self.facts
        if ops.family != facts.family:
            none = np.zeros(len(ops), dtype=np.bool_)
            return none, ops, np.zeros(len(ops))
        known, mapped, extra = stand_ins(ops, facts.names, facts.dtype, facts.phase, facts.layouts)
        for mode in FAMILIES[facts.family].modes:
            known &= (mapped.integers[mode] >= facts.low[mode]) & (mapped.integers[mode] <= facts.high[mode])
        if facts.kind == PRINCIPAL and known.any():
            known &= self._network_model().covers(mapped)
        return known, mapped, extra

    def _network_model(self) -> NetworkModel:
        if self._networks is None:
            self._networks = network_model_of(self.read_arrays(), self.facts.family, self.facts.names, self.name)
        return self._networks

    def outside(self, ops: Operators) -> Float64:
        """Return the doublings by which each operator's farthest size lies beyond the measured sizes, shape (n,)."""
        far = np.zeros(len(ops))
        for size in FAMILIES[self.facts.family].sizes:
            column = np.log2(np.maximum(ops.integers[size], 1))
            low, high = (np.log2(max(end[size], 1)) for end in (self.facts.low, self.facts.high))
            far = np.maximum(far, np.maximum(low - column, column - high))
        return far

    def of_name(self, ops: Operators, values: Mapping[str, float], default: float) -> Float64:
        """Look up each operator's name in ``values``, shape (n,)."""
        column = ops.texts["name"]
        return np.array([values.get(name, default) for name in column.table] or [default])[column.codes]


def read_model(
    json_file: Path | Traversable, arrays_file: Path | Traversable, *, shipped: bool = False
) -> LearnedModel:
    """Read a model without its arrays. Raises WhatifError if it is not a model of this version."""
    where = str(json_file)
    with expecting(f"{where}: expected a readable model", OSError), json_file.open("rb") as file:
        text = file.read(_LARGEST_JSON_BYTES + 1)
    damage = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)
    with expecting(f"{where}: expected a learned model", *damage, hint=_AGAIN):
        if len(text) > _LARGEST_JSON_BYTES:
            raise ValueError("a file of over a megabyte")
        facts = msgspec.json.decode(text, type=ModelFacts)
        _check(facts)
    return LearnedModel(where, facts, lambda: _read_arrays(arrays_file, facts.arrays_sha256), shipped)


def _check(facts: ModelFacts) -> None:
    """Raise ValueError if the parts of a model do not fit one another."""
    if (facts.version, facts.features_version) != (MODEL_VERSION, FEATURES_VERSION):
        raise ValueError(f"version {facts.version}.{facts.features_version}")
    if facts.family not in LEARNABLE or facts.kind not in KINDS or (facts.kind == PRINCIPAL and facts.across):
        raise ValueError(f"a model of {facts.family[:40]!r} by {facts.kind[:40]!r}")
    attributes = set(FAMILIES[facts.family].attributes)
    if set(facts.low) != attributes or set(facts.high) != attributes:
        raise ValueError("sizes of another family")
    numbers = [*facts.half.values(), facts.growth, *facts.launch_s.values()]
    if not facts.names or set(facts.half) != set(facts.names) or not all(0 <= n < 1e3 for n in numbers):
        raise ValueError("invalid widths")
    if not facts.across and facts.sheet is None:
        raise ValueError("no device data sheet")


def _read_arrays(file: Path | Traversable, sha256: str) -> dict[str, npt.NDArray[Any]]:
    """Read NAME.npz, after checking its hash against NAME.json."""
    damage = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
    with expecting(f"{file}: expected the arrays of a model", *damage, hint=_AGAIN):
        with file.open("rb") as opened:
            content = opened.read(_LARGEST_ARRAYS_BYTES + 1)
        if len(content) > _LARGEST_ARRAYS_BYTES or hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError("content that differs from its .json")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _LARGEST_ARRAYS_BYTES:
                raise ValueError("arrays that decompress to more than a model holds")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}


def write_model(folder: Path, name: str, facts: ModelFacts, arrays: Mapping[str, npt.NDArray[Any]]) -> Path:
    """Write NAME.npz and NAME.json (last: without it there is no model); returns the latter's path."""
    packed = io.BytesIO()  # its entries have no date, so equal arrays give equal bytes
    named: dict[str, Any] = dict(sorted(arrays.items()))
    np.savez_compressed(packed, **named)
    content = packed.getvalue()
    facts = msgspec.structs.replace(facts, arrays_sha256=hashlib.sha256(content).hexdigest())
    with replacing(folder / f"{name}.npz") as part:
        part.write_bytes(content)
    text = msgspec.json.format(msgspec.json.encode(facts, order="deterministic"), indent=1)
    with replacing(folder / f"{name}.json") as part:
        part.write_bytes(text + b"\n")
    return folder / f"{name}.json"


def models_in(folder: Path) -> tuple[list[LearnedModel], list[str]]:
    """Return a folder's models, by name, and a message for each invalid file; empty if it does not exist."""
    found, damaged = [], []
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            found.append(read_model(file, file.with_suffix(".npz")))
        except WhatifError as error:
            damaged.append(str(error))
    return found, damaged


@lru_cache(maxsize=1)
def shipped_models() -> tuple[LearnedModel, ...]:
    """Return the models shipped with the package, by name."""
    folder = resources.files("whatif.opdb") / "fitted"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".json")) if folder.is_dir() else []
    return tuple(
        read_model(folder / name, folder / (name.removesuffix(".json") + ".npz"), shipped=True) for name in names
    )
