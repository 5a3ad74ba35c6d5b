"""Tianshu's estimator: the pruning rules by hand, a power law that the search has to find, and networks in numpy."""

from __future__ import annotations

import importlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import need, replace
from tests.opdb.builders import V100, database, origin, provenance
from whatif.cli.main import main
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.index import Index
from whatif.opdb.learned import KINDS, LearnedModel, models_in, write_model
from whatif.opdb.rows import Operators, joined, measurements, operators
from whatif.runtime.errors import WhatifError

need("torch")
need("sklearn")

pytestmark = pytest.mark.slow
parameters: Any = importlib.import_module("whatif.instrumentation.estimators.principal.parameters")
search: Any = importlib.import_module("whatif.instrumentation.estimators.principal.search")
fitting: Any = importlib.import_module("whatif.instrumentation.estimators.principal.fitting")
batched: Any = importlib.import_module("whatif.instrumentation.estimators.principal.batched")
inference: Any = importlib.import_module("whatif.opdb.networks")
Parameter, Role = parameters.Parameter, parameters.Role

SIZES = np.array([[1.0, 16.0, 8.0, 32.0], [4.0, 300.0, 24.0, 5.0], [9.0, 64.0, 70.0, 11.0]])
TINY = search.Effort(
    candidate_steps=120,
    architecture_steps=40,
    final_steps=700,
    last_steps=0,
    layers=(3,),
    neurons=(6, 12),
    kept=1,
    rates=(0.01,),
)


def test_pruning_rules() -> None:
    """Tianshu, section 3.2.2: few values, a text, a dimension, anything else."""
    many, few = np.arange(6), np.array([1, 2, 4, 1, 2, 4])
    assert parameters.roles_of(Parameter("stride", few)) == (Role.MODE,)
    assert parameters.roles_of(Parameter("m", few, dimension=True)) == (Role.MODE,)
    assert parameters.roles_of(Parameter("type", np.array(list("abcdef")))) == (Role.NULL, Role.MODE)
    assert parameters.roles_of(Parameter("m", many, dimension=True)) == (Role.LINEAR, Role.NULL)
    assert set(parameters.roles_of(Parameter("stride", many))) == set(Role)


def test_candidates_of_a_matrix_product() -> None:
    """The paper's example: four dimensions and a data type leave 2^4 functions of 4^5."""
    shape = [Parameter(name, np.arange(9), dimension=True) for name in ("n", "m", "k", "l")]
    found = parameters.candidates([*shape, Parameter("type", np.array(["float", "int"] * 4 + ["int"]))])
    assert found.shape == (16, 5)
    assert len({tuple(row) for row in found.tolist()}) == 16
    assert not found[0].any()  # no principal component at all
    assert (found[:, 4] == 0).all()  # a mode has no exponent
    # Of a parameter that is no dimension the inverse is tried as well.
    assert len(parameters.candidates([*shape, Parameter("stride", np.arange(9))])) == 48
    with pytest.raises(ValueError, match="at most 1024"):
        parameters.candidates([Parameter(f"p{i}", np.arange(9)) for i in range(7)])


def test_modes_are_combinations() -> None:
    kernel, stride = np.array([1, 3, 1, 3, 3, 1, 1]), np.array([1, 1, 2, 1, 2, 1, 1])
    places, mode = parameters.modes_of(
        [Parameter("kernel", kernel), Parameter("m", np.arange(7), dimension=True), Parameter("stride", stride)]
    )
    assert places == (0, 2)
    assert mode.tolist() == [0, 2, 1, 2, 3, 0, 0]


def test_a_function_as_people_write_it() -> None:
    named = [Parameter(n, np.arange(9)) for n in ("n", "h", "stride")]
    assert parameters.formula(named, np.array([1, 1, -1])) == "n * h / (stride)"
    assert parameters.formula(named, np.array([0, 0, 0])) == "1"


def products_of_sizes(rows: int = 1500, seed: int = 1) -> tuple[Operators, Any]:
    """Products whose time is a floor and a share a multiplication, in two implementations."""
    draw = np.random.default_rng(seed)
    sizes = {name: draw.integers(1, 200, rows) for name in ("m", "n", "k")}
    ops = operators("matmul", sizes | {"batch": 1}, name="mm", dtype="fp32")
    return ops, 2e-4 + 1e-9 * np.prod([sizes[n].astype(float) for n in sizes], axis=0)


def test_the_search_finds_the_product() -> None:
    """Among eight functions of m, n and k, from raw numbers; it reduces a network's error to a fraction."""
    ops, t_s = products_of_sizes()
    found = fitting.search(fitting.parameters_of(ops), t_s, TINY, logs=False)
    assert found.formula() == "m * n * k"
    assert len(found.misses) == 8
    known = np.arange(len(t_s)) < 1300
    miss = {}
    for component in (True, False):
        networks = fitting.train_modes(found, t_s, known, TINY, logs=False, component=component)
        known_s = np.where(known, t_s, np.nan)
        predicted = fitting.predict_s(found, networks, known_s, logs=False, component=component)
        miss[component] = np.abs(predicted / t_s - 1)[~known].mean()
    assert miss[True] < 0.03
    assert miss[True] < 0.4 * miss[False]


def test_thinly_measured_modes_become_inputs() -> None:
    """Three kernel sizes of 100 calls each: one network for all of them, and its time distinguishes them."""
    draw = np.random.default_rng(2)
    kernel, size = np.repeat([1, 3, 5], 100), draw.integers(10, 400, 300)
    seen = (
        Parameter("name", np.full(300, "conv2d")), Parameter("kernel", kernel), Parameter("groups", np.ones(300)),
        Parameter("size", size, dimension=True),
    )  # fmt: skip
    t_s = 1e-4 + 1e-7 * kernel**2 * size
    found = fitting.search(seen, t_s, TINY, logs=True)
    assert found.varying == (1, 3)
    assert (found.mode == 0).all()
    networks = fitting.train_modes(found, t_s, np.ones(300, dtype=bool), TINY, logs=True, component=True)
    predicted = fitting.predict_s(found, networks, t_s, logs=True, component=True)
    assert np.abs(predicted / t_s - 1).mean() < 0.1


def test_too_few_measurements_are_refused() -> None:
    ops, t_s = products_of_sizes(50)
    with pytest.raises(Exception, match="expected at least 150 measurements"):
        fitting.search(fitting.parameters_of(ops), t_s, TINY, logs=True)


def network_of(width: int, layers: int, neurons: int, seed: int) -> Any:
    """A network of random weights whose measured range contains all queries."""
    draw = np.random.default_rng(seed)
    pairs = [
        (draw.normal(size=(rows, columns)), draw.normal(size=columns))
        for rows, columns in pairwise([width, *[neurons] * layers, 1])
    ]
    ends = np.full(width, 1e9)
    return inference.Network(tuple(pairs), draw.normal(size=width), np.full(width, 2.0), -ends, ends, 1e-3, 1e-5)


def slow_log_time(network: Any, sizes: list[float], exponents: list[int], *, logs: bool) -> float:
    """The answer for one operator, a number at a time."""
    inputs = [float(np.log2(s)) if logs else s for s in sizes]
    if any(exponents):
        product = 1.0
        for size, exponent in zip(sizes, exponents, strict=True):
            product *= size**exponent
        inputs.append(float(np.log2(product)) if logs else product)
    values = [(x - c) / s for x, c, s in zip(inputs, network.centre, network.scale, strict=True)]
    for number, (matrix, bias) in enumerate(network.layers, 1):
        sums = [
            b + sum(v * m for v, m in zip(values, column, strict=True))
            for b, column in zip(bias, matrix.T, strict=True)
        ]
        values = sums if number == len(network.layers) else [max(s, 0.0) for s in sums]
    return float(values[0] + np.log(1e-3)) if logs else float(np.log(max(values[0] * 1e-3, 0.5e-5)))


@given(
    logs=st.booleans(), exponents=st.lists(st.sampled_from([-1, 0, 1]), min_size=4, max_size=4),
    layers=st.integers(1, 5), neurons=st.integers(1, 9), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_network_equals_its_slow_twin(logs: bool, exponents: list[int], layers: int, neurons: int, seed: int) -> None:
    network, component = network_of(4 + any(exponents), layers, neurons, seed), any(exponents)
    columns = inference.inputs_of(SIZES, np.array(exponents), logs=logs)
    found = network.log_time(columns, logs=logs, component=component)
    expected = [slow_log_time(network, sizes, exponents, logs=logs) for sizes in SIZES.tolist()]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("logs", [True, False])
def test_time_goes_on_in_proportion_to_the_component(logs: bool) -> None:
    """At ten times what was measured the answer is ten times that of the box's edge; without a component it stays."""
    asked = np.array([[1.0, 16.0, 8.0, 32.0], [10.0, 16.0, 8.0, 32.0]])
    edge = float(asked[0].prod())
    network = network_of(5, 1, 3, 0)
    network = replace(
        network,
        layers=tuple((weight * 0, bias * 0 + 0.5) for weight, bias in network.layers),
        high=np.append(network.high[:4], np.log2(edge) if logs else edge),
    )
    columns = inference.inputs_of(asked, np.ones(4, dtype=np.int64), logs=logs)
    found = np.exp(network.log_time(columns, logs=logs, component=True))
    assert found[1] / found[0] == pytest.approx(10.0)
    plain = replace(network_of(4, 1, 3, 0), high=np.ones(4))
    columns = inference.inputs_of(asked, np.zeros(4, dtype=np.int64), logs=logs)
    answers = plain.log_time(columns, logs=logs, component=False)
    assert answers[0] == pytest.approx(answers[1])


def test_batched_networks_are_networks_of_their_own_widths() -> None:
    """A narrow network among wide ones: its arrays alone give what the batch gives."""
    torch: Any = importlib.import_module("torch")
    networks = batched.new_networks(4, 2, [3, 8], [5, 6])
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    target = x.abs().sum(dim=1) + 0.5
    task = batched.Task(x, None, target, True)
    batched.train(networks, task, torch.arange(10), steps=20, batch=5, rates=[0.01, 0.02], seed=3)
    together = networks(task.inputs(torch.arange(10), 2)).detach().numpy()
    for place, width in enumerate((3, 8)):
        value = x.numpy()
        layers = networks.arrays_of(place, width)
        assert layers[0].shape == (4, width)
        assert layers[4].shape == (width, 1)
        for at in range(0, 6, 2):
            value = value @ layers[at] + layers[at + 1]
            value = np.maximum(value, 0) if at < 4 else value
        np.testing.assert_allclose(value[:, 0], together[place], rtol=1e-5, atol=1e-6)


def test_training_is_the_same_every_time() -> None:
    ops, t_s = products_of_sizes(400)
    short = replace(TINY, candidate_steps=20, architecture_steps=5)
    found = [fitting.search(fitting.parameters_of(ops), t_s, short, logs=False).misses for _ in range(2)]
    np.testing.assert_array_equal(*found)


def contribution(rows: int = 600) -> Any:
    """Those of ``products_of_sizes`` and others of twice the time, under two names, with 1 % of noise."""
    draw, parts = np.random.default_rng(3), []
    for seed, name in ((1, "mm"), (2, "linear")):
        ops, t_s = products_of_sizes(rows, seed)
        parts.append((replace(ops, texts=operators("matmul", ops.integers, name=name, dtype="fp32").texts), t_s * seed))
    ops = joined([ops for ops, _ in parts])
    t_s = np.concatenate([t for _, t in parts]) * np.exp(draw.normal(0, 0.01, len(ops)))
    found = measurements(ops, t_s)
    return provenance(found, origin(V100)), found.canonical()


@pytest.fixture(scope="module")
def fitted() -> Any:
    models: Any = importlib.import_module("whatif.instrumentation.estimators.principal.models")
    samples: Any = importlib.import_module("whatif.instrumentation.estimators.samples")
    [found] = models.fit_networks(list(samples.samples_of([contribution()])), effort=TINY)
    return found


def test_networks_of_a_device_are_fitted_and_answer(fitted: Any, tmp_path: Path) -> None:
    """Written, read again, and asked by the chain: a network for each name, with the component that was found."""
    assert fitted.facts.kind == "principal"
    assert fitted.facts.names == ("linear", "mm")
    assert fitted.facts.components["mm"] == "m * n * k"
    assert max(fitted.facts.validation_pct.values()) < 6
    write_model(tmp_path, "networks", fitted.facts, fitted.arrays)
    [model], wrong = models_in(tmp_path)
    assert wrong == []
    ops, t_s = products_of_sizes(200, seed=9)
    answers = Estimator(Index({}, {}, (), ()), V100, models=[model]).estimate(ops)
    assert set(answers.answered_by.tolist()) == {AnswerSource.LEARNED}
    assert np.abs(answers.t_s / t_s - 1).mean() < 0.06
    # Another number of batches is another mode, which no network was trained for.
    other = replace(ops, integers={**ops.integers, "batch": np.full(len(ops), 3)})
    assert not model.covers(other)[0].any()


def test_damaged_networks_are_refused(fitted: Any, tmp_path: Path) -> None:
    damages: list[dict[str, Any]] = [
        {"of": fitted.arrays["of"][:, :2]},
        {"0.weight.0": fitted.arrays["0.weight.0"][:1]},
        {"0.scaling": fitted.arrays["0.scaling"] * np.nan},
        {"0.seconds": np.array([0.0, 1.0])},
    ]
    for damage in damages:
        write_model(tmp_path, "networks", fitted.facts, {**fitted.arrays, **damage})
        [model], _ = models_in(tmp_path)
        with pytest.raises(WhatifError, match=r"expected the arrays of a model of networks, got .*fit it again"):
            model.covers(products_of_sizes(3)[0])


def test_the_kinds_that_the_command_line_offers() -> None:
    from whatif.cli.opdb_fit import MODELS

    assert MODELS == KINDS


def test_the_model_with_the_smaller_error_answers(fitted: Any) -> None:
    """The model with the smaller error answers, by name and method, whatever the order of the files."""
    ops, _ = products_of_sizes(50, seed=9)
    answers = {}
    for miss in (0.1, 50.0):
        facts = msgspec.structs.replace(fitted.facts, validation_pct=dict.fromkeys(fitted.facts.names, miss))
        half = msgspec.structs.replace(facts, validation_pct=dict.fromkeys(facts.names, 1.0))
        shifted = {**fitted.arrays}
        for name in [name for name in shifted if name.endswith(".seconds")]:
            shifted[name] = shifted[name] * 2
        models = [
            LearnedModel("b", facts, lambda: fitted.arrays), LearnedModel("a", half, lambda shifted=shifted: shifted)
        ]  # fmt: skip
        answers[miss] = Estimator(Index({}, {}, (), ()), V100, models=models).estimate(ops).t_s
    np.testing.assert_allclose(answers[50.0] / answers[0.1], 2.0)


def test_the_command_fits_and_evaluates_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: Any = importlib.import_module("whatif.instrumentation.estimators.principal.models")
    trees: Any = importlib.import_module("whatif.instrumentation.estimators.fitting")
    # What is learned is not looked at.
    effort = replace(TINY, candidate_steps=10, architecture_steps=10, final_steps=20)
    monkeypatch.setattr(models, "Effort", lambda: effort)
    monkeypatch.setitem(trees.SAME_DEVICE, "matmul", trees.Settings(rounds=20, rate=0.2))
    said, rows = contribution(400)
    folder = database(tmp_path / "db", (rows, said.origin)).folder
    both = ("--model", "trees", "--model", "principal")
    assert main(["opdb", "fit", "--db", str(folder), *both, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["models"]
    assert sorted(model["model"] for model in found) == ["principal", "trees"]
    assert len(list((folder / "models").glob("*.json"))) == 2
    assert main(["opdb", "evaluate", "--fit", "--db", str(folder), *both]) == 0
    shown = capsys.readouterr().out
    assert "Models side by side" in shown
    assert " ".join(shown.split()).count("principal trees answer printed") == 1
    for words, message in (
        (["fit", "--across", "--model", "principal"], "networks are of one device"),
        (["evaluate", "--model", "principal"], "expected --model with --fit"),
        (["evaluate", "--fit", "--unseen-device", "--model", "principal"], "it fits trees to all"),
    ):
        assert main(["opdb", *words, "--db", str(folder)]) == 1
        assert message in capsys.readouterr().err
