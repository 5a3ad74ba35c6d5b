"""Does predicting the kernel help to predict its time? Trees without the kernel, with it, and with a guess of it.

    python benchmarks/kernel_classes.py FOLDER [--device V100-PCIE-32]

FOLDER is an op database with NeuSight's rows, which contain the kernels of each call. Ten percent of the operators
are held out by their keys. The guess comes from a classifier that is trained on the rest, and for the rest itself on
two thirds at a time, so that the trees learn from realistic guesses. Prints one line per operator.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from whatif.graph.types import Float64
from whatif.opdb.evaluate import SEED, SHARE
from whatif.opdb.index import read_contributions
from whatif.opdb.keys import held_out
from whatif.opdb.rows import Rows
from whatif.opdb.store import Store

samples = importlib.import_module("whatif.instrumentation.estimators.samples")

OPERATORS = ("bmm", "linear", "conv2d")
# Kernels that ran less often are one class.
FEWEST_OF_A_CLASS = 8


def main() -> None:
    """Print the errors of each operator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="V100-PCIE-32")
    asked = parser.parse_args()
    for provenance, rows in read_contributions(Store.open(asked.folder))[0]:
        names = np.array(rows.ops.texts["name"].decoded())
        for name in OPERATORS:
            of_name = names == name
            if provenance.origin.device.name == asked.device and of_name.any() and rows.kernels.table != ("",):
                print(name, *score(provenance, rows.take(of_name), name), flush=True)


def score(provenance: Any, rows: Rows, name: str) -> list[str]:
    """Return mean errors in % without the class, with the true and the guessed one, and the accuracy of the guess."""
    (sample,) = samples.samples_of([(provenance, rows)])
    # Samples are sorted by key and time.
    kernels = np.array(rows.kernels.decoded())[np.lexsort((rows.t_s, rows.ops.keys))]
    _, kind, count = np.unique(kernels, return_inverse=True, return_counts=True)
    kind = np.unique(np.where(count[kind] < FEWEST_OF_A_CLASS, -1, kind), return_inverse=True)[1]
    x, y = sample.features((name,), across=False)[0], sample.target()
    out = held_out(sample.ops.keys, SEED, SHARE)
    known = ~out & sample.sound
    guess = guesses(x, kind, known, out)
    true = np.eye(kind.max() + 1)[kind]
    missed = [miss_pct(columns, y, known, out) for columns in (x, np.c_[x, true], np.c_[x, guess])]
    right = 100 * (guess[out].argmax(axis=1) == kind[out]).mean()
    return [f"{kind.max() + 1} classes", *(f"{m:.2f} %" for m in missed), f"{right:.0f} % guessed right"]


def guesses(
    x: Float64, kind: npt.NDArray[np.int64], known: npt.NDArray[np.bool_], out: npt.NDArray[np.bool_]
) -> Float64:
    """Return the probability of each class, shape (n, classes), from classifiers not trained on the row."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import KFold

    found = np.zeros((len(x), kind.max() + 1))
    learned = np.flatnonzero(known)
    parts = [(learned[a], learned[b]) for a, b in KFold(3, shuffle=True, random_state=0).split(learned)]
    for fit_rows, asked in [*parts, (learned, np.flatnonzero(out))]:
        # Small steps and large leaves: rare classes make larger ones diverge.
        model = HistGradientBoostingClassifier(
            max_iter=60, learning_rate=0.06, max_leaf_nodes=8, min_samples_leaf=20, l2_regularization=5.0,
            early_stopping=False, random_state=0,
        ).fit(x[fit_rows], kind[fit_rows])  # fmt: skip
        found[np.ix_(asked, model.classes_)] = model.predict_proba(x[asked])
    return found


def miss_pct(x: Float64, y: Float64, known: npt.NDArray[np.bool_], out: npt.NDArray[np.bool_]) -> float:
    """Return the mean error of trees on the held-out rows, percent."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = HistGradientBoostingRegressor(
        loss="absolute_error", max_iter=400, learning_rate=0.08, max_leaf_nodes=31, min_samples_leaf=10,
        max_features=0.4, l2_regularization=1.0, max_bins=254, early_stopping=False, random_state=0,
    ).fit(x[known], y[known])  # fmt: skip
    return float(100 * np.mean(np.abs(np.expm1(model.predict(x[out]) - y[out]))))


if __name__ == "__main__":
    main()
