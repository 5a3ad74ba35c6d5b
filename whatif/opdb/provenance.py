"""The origin of measurements: the sidecar of every shard, one JSON object, checked against these types when read."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from whatif.graph.described import FAMILIES
from whatif.opdb.schema import CACHE_STATES, METHODS, SCHEMA_VERSION
from whatif.runtime.errors import WhatifError, expecting

# The largest sidecar, bytes: it is about a page of text.
LARGEST_SIDECAR_BYTES = 1_000_000


class Device(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The measured device: its name in ``whatif/hardware/gpus`` (or ``cpu:…``), and the name the source gave it."""

    name: str
    reported_as: str = msgspec.field(name="told", default="")


class Environment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything but the device that a time depends on; unknown fields are None, and absent from the file."""

    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    framework: str | None = None
    framework_version: str | None = None
    os: str | None = None
    cpu: str | None = None
    threads: int | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_limit_watt: float | None = None
    clocks_locked: bool | None = None
    tf32_allowed: bool | None = None


class Method(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a time was measured; ``includes_launch`` is None if unknown."""

    name: str = "unknown"
    includes_launch: bool | None = None
    cache: str = "unknown"


class Source(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The author, tool and location of the measurements."""

    author: str | None = None
    date: str | None = None
    tool: str | None = None
    tool_version: str | None = None
    uri: str | None = None
    sha256: str | None = None  # of the file that was imported
    licence: str | None = None
    note: str | None = None


class Basis(NamedTuple):
    """The quantity that a time measures: times of different bases are never mixed."""

    method: str
    launch: str
    cache: str
    framework: str

    @property
    def has_launch(self) -> bool:
        """Whether the times are known to include a launch."""
        return self.launch == "with launch"


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything about a contribution except its rows: device, environment, method and source."""

    device: Device
    environment: Environment = Environment()
    method: Method = Method()
    source: Source = Source()

    @property
    def basis(self) -> Basis:
        """The fields that two times must share to measure the same quantity."""
        launch = {None: "unknown", True: "with launch", False: "without launch"}[self.method.includes_launch]
        return Basis(self.method.name, launch, self.method.cache, self.environment.framework or "unknown")

    @property
    def environment_id(self) -> str:
        """A twelve-digit hash of the environment."""
        return hashlib.sha256(_canonical(self.environment)).hexdigest()[:12]


class Provenance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The sidecar of a shard. ``contribution`` is a hash of the other fields and of the rows."""

    schema_version: int
    contribution: str
    family: str
    rows: int
    sha256: str  # of the rows' content
    times_sha256: str  # of their operators and times alone
    origin: Origin


def contribution_id(origin: Origin, family: str, sha256: str) -> str:
    """Return the name of a contribution, which only depends on its rows and their origin."""
    digest = hashlib.sha256(f"{SCHEMA_VERSION} {family} {sha256} ".encode())
    digest.update(_canonical(origin))
    return digest.hexdigest()[:24]


def encode(provenance: Provenance) -> bytes:
    """Return the sidecar as indented text."""
    return msgspec.json.format(_canonical(provenance), indent=2) + b"\n"


def read_sidecar(path: Path) -> Provenance:
    """Read a sidecar. Raises WhatifError if it is damaged, or not of this version."""
    with expecting(f"{path}: expected a readable sidecar", OSError), path.open("rb") as file:
        text = file.read(LARGEST_SIDECAR_BYTES + 1)
    if len(text) > LARGEST_SIDECAR_BYTES:
        raise WhatifError(f"{path}: expected the sidecar of a shard, got a file of over a megabyte; remove it.")
    damage = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    with expecting(f"{path}: expected the sidecar of a shard", *damage, hint="; remove it"):
        version = msgspec.json.decode(text, type=_Version).schema_version
    if version != SCHEMA_VERSION:
        raise WhatifError(
            f"{path}: expected version {SCHEMA_VERSION} of the op database, got version {version}; "
            "use the program that wrote it."
        )
    with expecting(f"{path}: expected the sidecar of a shard", *damage, hint="; remove it"):
        found = msgspec.json.decode(text, type=Provenance)
    wrong = _first_wrong(found)
    if wrong:
        raise WhatifError(f"{path}: expected {wrong}; remove it.")
    return found


class _Version(msgspec.Struct):
    schema_version: int


def _first_wrong(found: Provenance) -> str | None:
    method = found.origin.method
    checks = (
        (found.family in FAMILIES, f"a known operator family, got {found.family[:40]!r}"),
        (method.name in METHODS, f"a known measuring method, got {method.name[:40]!r}"),
        (method.cache in CACHE_STATES, f"a known cache state, got {method.cache[:40]!r}"),
        (found.rows > 0, f"a positive number of rows, got {found.rows}"),
        (re.fullmatch(r"[0-9a-f]{24}", found.contribution), f"a contribution's id, got {found.contribution[:40]!r}"),
        (0 < len(found.origin.device.name) <= 120, "the name of a device"),
        (
            found.contribution == contribution_id(found.origin, found.family, found.sha256),
            "the id computed from its content, got another one: it was changed after it was written",
        ),
    )
    return next((sentence for holds, sentence in checks if not holds), None)


def _canonical(facts: msgspec.Struct) -> bytes:
    return msgspec.json.encode(facts, order="sorted")
