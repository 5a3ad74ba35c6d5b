"""Networks in numpy: by hand, against a slow twin, beyond what was measured, and arrays that are none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whatif.errors import WhatifError
from whatif.graph.described import FAMILIES
from whatif.opdb.features import FEATURES_VERSION
from whatif.opdb.learned import MODEL_VERSION, ModelFacts, models_in, write_model
from whatif.opdb.network_model import ARRAYS, log_time_of
from whatif.opdb.rows import Operators, operators

Arrays = dict[str, npt.NDArray[Any]]
SIZES = {"batch": [1, 4, 9], "m": [16, 300, 64], "n": [8, 24, 70], "k": [32, 5, 11]}


def products(name: str = "mm") -> Operators:
    return operators("matmul", SIZES, name=name, dtype="fp32")


def facts(names: tuple[str, ...] = ("mm",)) -> ModelFacts:
    attributes = FAMILIES["matmul"].attributes
    return ModelFacts(
        version=MODEL_VERSION, features_version=FEATURES_VERSION, kind="network", family="matmul", device="T4",
        names=names, dtype="fp32", basis=("event_pair", "with launch", "unknown", "pytorch"),
        low=dict.fromkeys(attributes, 1), high=dict.fromkeys(attributes, 1024), half=dict.fromkeys(names, 0.1),
        growth=0.4, devices=("T4",), rows=3, data_sha256="", arrays_sha256="", sources=(),
    )  # fmt: skip


def arrays(*, logs: bool, exponents: list[int], layers: int = 2, neurons: int = 3, seed: int = 0) -> Arrays:
    """A network of random weights for products, whose box holds all of ``SIZES``."""
    draw = np.random.default_rng(seed)
    width = 4 + any(exponents)
    sizes = [width, *[neurons] * layers, 1]
    count = sum(a * b + b for a, b in pairwise(sizes))
    return {
        "logs": np.array([int(logs)]), "inputs": np.arange(4), "exponents": np.array(exponents),
        "mode_attributes": np.array([], dtype=np.int64), "modes": np.array([[0]]), "layers": np.array([layers]),
        "neurons": np.array([neurons]), "weights": draw.normal(size=count).astype(np.float32),
        "starts": np.array([0, count]), "centre": draw.normal(size=(1, width)), "scale": np.full((1, width), 2.0),
        "low": np.zeros((1, width)), "high": np.full((1, width), 1e9), "unit_s": np.array([1e-3]),
        "shortest_s": np.array([1e-5]),
    }  # fmt: skip


def slow_log_time(model: Arrays, sizes: list[float]) -> float:
    """The answer for one operator, a number at a time."""
    logs, exponents = bool(model["logs"][0]), model["exponents"].tolist()
    inputs = [float(np.log2(s)) if logs else s for s in sizes]
    if any(exponents):
        product = 1.0
        for size, exponent in zip(sizes, exponents, strict=True):
            product *= size**exponent
        inputs.append(float(np.log2(product)) if logs else product)
    values = [(x - c) / s for x, c, s in zip(inputs, model["centre"][0], model["scale"][0], strict=True)]
    weights, layers = model["weights"].astype(np.float64).tolist(), int(model["layers"][0])
    for layer in range(layers + 1):
        out = 1 if layer == layers else int(model["neurons"][0])
        matrix, weights = weights[: len(values) * out], weights[len(values) * out :]
        bias, weights = weights[:out], weights[out:]
        sums = [bias[j] + sum(v * matrix[i * out + j] for i, v in enumerate(values)) for j in range(out)]
        values = sums if layer == layers else [max(s, 0.0) for s in sums]
    if not logs:
        return float(np.log(max(values[0] * 1e-3, 0.5e-5)))
    return values[0] + float(np.log(1e-3))


@given(
    logs=st.booleans(), exponents=st.lists(st.sampled_from([-1, 0, 1]), min_size=4, max_size=4),
    layers=st.integers(1, 5), neurons=st.integers(1, 9), seed=st.integers(0, 99),
)  # fmt: skip
def test_equals_the_slow_twin(logs: bool, exponents: list[int], layers: int, neurons: int, seed: int) -> None:
    model = arrays(logs=logs, exponents=exponents, layers=layers, neurons=neurons, seed=seed)
    model["low"][:] = -1e9  # of a component below one the logarithm is negative
    found = log_time_of(facts(), model, "here")(products(), None)
    expected = [slow_log_time(model, [float(SIZES[a][i]) for a in SIZES]) for i in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_goes_on_in_proportion_to_the_component() -> None:
    """At ten times what was measured the answer is ten times that of the box's edge; without a component it stays."""
    for logs in (True, False):
        model = arrays(logs=logs, exponents=[1, 1, 1, 1])
        model["weights"][:] = 0
        model["weights"][-1] = 0.5  # the network says 0.5 of everything
        edge = 1 * 16 * 8 * 32
        model["high"][0, -1] = np.log2(edge) if logs else edge
        asked = operators("matmul", {"batch": [1, 10], "m": 16, "n": 8, "k": 32}, name="mm", dtype="fp32")
        found = np.exp(log_time_of(facts(), model, "here")(asked, None))
        assert found[1] / found[0] == pytest.approx(10.0)
        plain = arrays(logs=logs, exponents=[0, 0, 0, 0])
        plain["high"][:] = 1.0
        answers = log_time_of(facts(), plain, "here")(asked, None)
        assert answers[0] == pytest.approx(answers[1])


def test_each_mode_has_its_own_network() -> None:
    """Two names, two networks; a name that has none gets no answer."""
    one, two = (arrays(logs=True, exponents=[0, 0, 0, 0], seed=s) for s in (1, 2))
    both = {n: np.concatenate([one[n], two[n]]) for n in ARRAYS if len(one[n]) == 1 and n not in ("logs",)}
    both = one | both | {"weights": np.concatenate([one["weights"], two["weights"]]), "modes": np.array([[0], [2]])}
    both["starts"] = np.array([0, len(one["weights"]), 2 * len(one["weights"])])
    ask = log_time_of(facts(("bmm", "linear", "mm")), both, "here")
    alone = log_time_of(facts(("mm",)), two, "here")
    assert np.isnan(ask(products("linear"), None)).all()
    np.testing.assert_array_equal(ask(products("mm"), None), alone(products("mm"), None))
    assert (ask(products("bmm"), None) != ask(products("mm"), None)).all()


def test_a_written_model_is_read_again(tmp_path: Any) -> None:
    model = arrays(logs=True, exponents=[1, 1, 1, 1])
    write_model(tmp_path, "net", facts(), model)
    (read,), wrong = models_in(tmp_path)
    assert wrong == []
    np.testing.assert_array_equal(read.predict(products(), None), log_time_of(facts(), model, "here")(products(), None))


DAMAGE: dict[str, Any] = {
    "no such array 'weights'": lambda a: a.pop("weights"),
    "no such array 'modes'": lambda a: a.update(modes=np.zeros(3, dtype=np.int64)),
    "numbers that are none": lambda a: a["weights"].__setitem__(0, np.nan),
    "attributes of another family": lambda a: a.update(inputs=np.array([0, 1, 2, 7])),
    "another principal component": lambda a: a.update(exponents=np.array([1, 1])),
    "modes of another model": lambda a: a.update(modes=np.array([[5]])),
    "columns of different lengths": lambda a: a.update(unit_s=np.array([1.0, 1.0])),
    "inputs of another model": lambda a: a.update(centre=np.zeros((1, 2))),
    "networks of impossible sizes": lambda a: a.update(layers=np.array([10**9])),
    "scales that are none": lambda a: a.update(scale=np.zeros((1, 5))),
    "weights of networks of other sizes": lambda a: a.update(weights=a["weights"][:-1]),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_arrays_that_are_none_are_refused(said: str) -> None:
    model = arrays(logs=False, exponents=[1, 1, 1, 1])
    DAMAGE[said](model)
    with pytest.raises(WhatifError, match=f"here: expected the arrays of a model of networks, got {said}"):
        log_time_of(facts(), model, "here")


@given(data=st.data())
def test_no_damage_is_more_than_a_sentence(data: st.DataObject) -> None:
    """Whatever an array is made of, the answer is a WhatifError or numbers."""
    model = arrays(logs=True, exponents=[1, 0, 1, 1])
    name = data.draw(st.sampled_from(sorted(ARRAYS)))
    shape = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=2))
    number = data.draw(st.sampled_from([0, -1, 1, 5, 2**40]))
    model[name] = np.full(shape, number, dtype=ARRAYS[name][0])
    try:
        found = log_time_of(facts(), model, "here")(products(), None)
    except WhatifError:
        return
    assert found.shape == (3,)


def test_only_known_kinds_are_read(tmp_path: Any) -> None:
    write_model(tmp_path, "net", msgspec.structs.replace(facts(), kind="oracle"), {"a": np.zeros(1)})
    models, (wrong,) = models_in(tmp_path)
    assert not models
    assert "'oracle'" in wrong
