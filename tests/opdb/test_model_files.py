"""Learned models as files: read as written, and refused where damaged."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.opdb.builders import V100, products
from tests.opdb.learned import EMPTY, constant, expected_s, facts, written
from whatif.hardware.gpu import load_gpu
from whatif.opdb.chain import Estimator
from whatif.opdb.learned import (
    models_in,
    read_model,
    write_model,
)
from whatif.runtime.errors import WhatifError


def test_a_model_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = written(tmp_path)
    again = read_model(path, path.with_suffix(".npz"))
    assert msgspec.structs.replace(again.facts, arrays_sha256="") == facts()
    asked = products([64])
    assert Estimator(EMPTY, V100, models=[again]).estimate(asked).t_s == pytest.approx(2 * expected_s(asked, V100))
    (tmp_path / "twice").mkdir()
    other = written(tmp_path / "twice")
    for suffix in (".json", ".npz"):
        assert other.with_suffix(suffix).read_bytes() == path.with_suffix(suffix).read_bytes()


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe{}"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text("{}"),
        lambda path: path.write_bytes(b" " * 1_000_001),
        edit(lambda document: document.update(version=99)),
        edit(lambda document: document.update(features_version=99)),
        edit(lambda document: document.update(family="other")),
        edit(lambda document: document.update(kind="pickle")),
        edit(lambda document: document.update(more=1)),
        edit(lambda document: document["low"].pop("m")),
        edit(lambda document: document["half"].update(mm=-1)),
        edit(lambda document: document.update(half={})),
        edit(lambda document: document.update(names=[])),
        edit(lambda document: document.update(growth=float("1e9"))),
        edit(lambda document: document.update(sheet=None)),
    ],
)
def test_what_is_no_model_is_refused_and_the_others_remain(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    written(tmp_path, "good")
    bad = written(tmp_path, "bad")
    damage(bad)
    found, wrong = models_in(tmp_path)
    assert [Path(m.name).stem for m in found] == ["good"]
    assert len(wrong) == 1
    assert "bad.json: expected a learned model, got" in wrong[0]
    assert "\n" not in wrong[0]


def hashed(path: Path) -> None:
    """Record the hash of the current arrays: an attacker can."""
    import hashlib

    document = json.loads(path.read_text())
    document["arrays_sha256"] = hashlib.sha256(path.with_suffix(".npz").read_bytes()).hexdigest()
    path.write_text(json.dumps(document))


def pickled(path: Path) -> None:
    np.savez(path.with_suffix(".npz"), edges=np.array([{"a": 1}], dtype=object))
    hashed(path)


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path.with_suffix(".npz"), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("edges.npy", b"\0" * 33_000_000)
    hashed(path)


def cut(path: Path) -> None:
    arrays = path.with_suffix(".npz")
    arrays.write_bytes(arrays.read_bytes()[:-30])
    hashed(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.with_suffix(".npz").unlink(),
        lambda path: path.with_suffix(".npz").write_bytes(b"no archive"),
        pickled,
        bomb,
        cut,
    ],
)
def test_damaged_arrays_are_one_sentence(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = written(tmp_path)
    damage(path)
    found, _ = models_in(tmp_path)
    with pytest.raises(WhatifError, match=r"expected the arrays of a model.*fetch it again\.$"):
        found[0].predict(products([8]), load_gpu(V100))


def test_only_known_kinds_are_read(tmp_path: Path) -> None:
    written(tmp_path, kind="oracle")
    models, (wrong,) = models_in(tmp_path)
    assert not models
    assert "'oracle'" in wrong


def test_features_of_another_kind_are_refused(tmp_path: Path) -> None:
    document = facts(features=("log2 something",))
    path = write_model(tmp_path, "odd", document, constant(0.0, 1))
    with pytest.raises(WhatifError, match="with this version's features"):
        read_model(path, path.with_suffix(".npz")).predict(products([8]), None)
