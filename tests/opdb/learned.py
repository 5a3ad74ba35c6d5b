"""Learned models by hand: forests of one leaf."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.opdb.builders import T4, V100, products
from whatif.hardware.gpu import load_gpu
from whatif.opdb.features import FEATURES_VERSION, features, reference_s, sheet_of
from whatif.opdb.index import Index
from whatif.opdb.learned import (
    MODEL_VERSION,
    LearnedModel,
    ModelFacts,
    Source,
    write_model,
)
from whatif.opdb.provenance import Basis
from whatif.opdb.rows import Operators

EMPTY = Index({}, {}, (), ())


LAUNCHED = Basis("event_pair", "with launch", "unknown", "pytorch")


KERNELS = Basis("graph_replay", "without launch", "hot", "trtllm")


BOX = {"batch": (1, 1), "m": (1, 4096), "n": (1, 4096), "k": (1, 4096)}


def constant(log_factor: float, features: int) -> dict[str, np.ndarray[Any, Any]]:
    """A forest of one leaf: every time is the given multiple of the reference time."""
    return {
        "edges": np.zeros(0), "edge_starts": np.zeros(features + 1, dtype=np.int64),
        "feature": np.array([255], dtype=np.uint8), "bin": np.zeros(1, dtype=np.uint8),
        "right": np.zeros(1, dtype=np.uint16), "value": np.array([log_factor], dtype=np.float32),
        "starts": np.array([0, 1]), "base": np.array([0.0]),
    }  # fmt: skip


def facts(
    device: str = V100, *, basis: Basis = LAUNCHED, half: float = 0.1, names: Sequence[str] = ("mm",), **more: Any
) -> ModelFacts:
    gpu = load_gpu(device or V100)
    sheet = sheet_of(gpu, "matmul")
    called = features(products([8]), sheet, names, across=not device)[1]
    model_facts = {
        "version": MODEL_VERSION, "features_version": FEATURES_VERSION, "kind": "trees", "family": "matmul",
        "device": device, "names": tuple(names), "dtype": "fp32", "basis": tuple(basis), "features": called,
        "sheet": sheet if device else None, "low": {a: low for a, (low, _) in BOX.items()},
        "high": {a: high for a, (_, high) in BOX.items()}, "half": dict.fromkeys(names, half), "growth": 0.2,
        "devices": (device or T4,), "rows": 1000, "data_sha256": "0" * 64, "arrays_sha256": "",
        "sources": (Source(name="a test", licence="MIT"),),
    }  # fmt: skip
    return ModelFacts(**{**model_facts, **more})


def model(factor: float = 2.0, device: str = V100, name: str = "a model", **more: Any) -> LearnedModel:
    """A model that predicts ``factor`` times the reference time."""
    model_facts = facts(device, **more)
    return LearnedModel(name, model_facts, lambda: constant(np.log(factor), len(model_facts.features)))


def expected_s(ops: Operators, device: str, *, launch: bool = True) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return reference_s(ops, sheet_of(load_gpu(device), "matmul"), launch=launch)


def written(folder: Path, name: str = "one", **more: Any) -> Path:
    model_facts = facts(**more)
    return write_model(folder, name, model_facts, constant(np.log(2.0), len(model_facts.features)))
