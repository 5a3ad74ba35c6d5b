"""Models fitted to made-up devices with known times, and through the command line; training here is small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.helpers import need
from tests.opdb.builders import T4, V100, database, origin, own_cache, provenance
from whatif.cli.main import main
from whatif.hardware.gpu import load_gpu
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.devices import facts
from whatif.opdb.evaluate import evaluate, evaluate_unseen_devices
from whatif.opdb.features import reference_s, sheet_of
from whatif.opdb.index import Index
from whatif.opdb.provenance import Environment, Origin, Provenance
from whatif.opdb.rows import Operators, Rows, measurements, operators

need("sklearn")
samples = need("whatif.instrumentation.estimators.samples")
fitting = need("whatif.instrumentation.estimators.fitting")
models = need("whatif.instrumentation.estimators.models")
boosting = need("whatif.instrumentation.estimators.boosting")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

__all__ = ["own_cache"]

P100, A100, H100, L4 = "P100-PCIE-16", "A100-PCIE-40", "H100-SXM-80", "L4"
SMALL = dict.fromkeys(("elementwise", "matmul", "normalization"), boosting.Settings(rounds=40, rate=0.2))
EMPTY = Index({}, {}, (), ())


def additions(elements: Any, name: str = "add") -> Operators:
    return operators("elementwise", {"elements": elements, "tensors": 2}, name=name, dtype="fp32")


def measured(device: str = V100, seed: int = 0, count: int = 600, noise: float = 0.02) -> Rows:
    """Additions that take the reference time, 1.5 times as long beyond the cache, with some noise."""
    random = np.random.default_rng(seed)
    elements = np.unique((10 ** random.uniform(3, 8, count)).astype(np.int64))
    ops = additions(elements)
    gpu = facts(device) or load_gpu(V100)
    slower = np.where(12 * elements > gpu.l2_mbyte * 1e6, 1.5, 1.0)
    base_s = reference_s(ops, sheet_of(gpu, "elementwise"), launch=True)
    return measurements(ops, base_s * slower * np.exp(random.normal(0, noise, len(ops))))


def contributed(rows: Rows, device: str) -> tuple[Provenance, Rows]:
    return provenance(rows, origin(device)), rows.canonical()


def test_a_device_model_learns_the_residual() -> None:
    fitted = list(fitting.fit_devices(list(samples.samples_of([contributed(measured(), V100)])), settings=SMALL))
    assert [(m.facts.device, m.facts.family, m.facts.names) for m in fitted] == [(V100, "elementwise", ("add",))]
    fresh = measured(seed=5)
    answers = Estimator(EMPTY, V100, models=models.in_memory(fitted)).estimate(fresh.ops)
    assert set(answers.answered_by.tolist()) <= {AnswerSource.LEARNED, AnswerSource.ANALYTIC}
    inside = answers.outside == 0
    miss = np.abs(answers.t_s / fresh.t_s - 1)[inside]
    assert miss.mean() < 0.025  # noise of 2 % misses by 1.6 % at the least
    held = ((answers.low_s <= fresh.t_s) & (fresh.t_s <= answers.high_s))[inside]
    assert 0.85 < held.mean() < 0.97
    assert fitted[0].facts.validation_pct["add"] == pytest.approx(1.9, abs=0.6)
    assert 0.02 < fitted[0].facts.half["add"] < 0.06
    # Its smallest operators take 20 us; three of them are a kernel's own.
    assert fitted[0].facts.launch_s["add"] == pytest.approx(17e-6, rel=0.1)


def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        rows = contributed(measured(count=300), V100)
        models.write_models(tmp_path / name, fitting.fit_devices(list(samples.samples_of([rows])), settings=SMALL))
    files = sorted((tmp_path / "one").iterdir())
    assert [file.suffix for file in files] == [".json", ".npz"]
    for file in files:
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_what_is_set_aside_is_not_learned_and_a_model_knows_where_it_wins() -> None:
    rows = measured()
    t_s = rows.t_s.copy()
    t_s[::50] *= 50  # strays
    sample = next(samples.samples_of([contributed(measurements(rows.ops, t_s), V100)]))
    assert not sample.sound[np.isin(sample.t_s, t_s[::50])].any()
    assert sample.sound.mean() > 0.97
    assert len(sample) == len(rows)
    # Times that jump with the last bit: neighbours know nothing, a feature does.
    odd = measurements(rows.ops, rows.t_s * np.where(rows.ops.integers["elements"] % 2 == 1, 1.6, 1.0))
    fitted = list(fitting.fit_devices(list(samples.samples_of([contributed(odd, V100)])), settings=SMALL))
    assert fitted[0].facts.before_interpolation == ("add",)
    assert fitted[0].facts.validation_pct["add"] < 6


def test_a_device_without_a_data_sheet_is_learned_from_its_own_rates() -> None:
    cpu = "cpu:some CPU x1"
    fitted = list(fitting.fit_devices(list(samples.samples_of([contributed(measured(cpu), cpu)])), settings=SMALL))
    fresh = measured(cpu, seed=9)
    answers = Estimator(EMPTY, cpu, models=models.in_memory(fitted)).estimate(fresh.ops)
    assert set(answers.answered_by.tolist()) == {AnswerSource.LEARNED}
    assert np.median(np.abs(answers.t_s / fresh.t_s - 1)) < 0.03


def test_too_few_are_none() -> None:
    few = [contributed(measured(d, count=150), d) for d in (V100, T4, P100, A100)]
    assert list(fitting.fit_devices(list(samples.samples_of(few)), settings=SMALL)) == []
    three = [contributed(measured(d, count=300), d) for d in (V100, T4, P100)]
    assert list(fitting.fit_across(list(samples.samples_of(three)), settings=SMALL["elementwise"])) == []
    # Kernels alone and with launches, or two formats, are not one kind.
    other = [(provenance(r, origin(A100, launch=False)), r) for _, r in [contributed(measured(A100, count=300), A100)]]
    assert list(fitting.fit_across(list(samples.samples_of(three + other)), settings=SMALL["elementwise"])) == []


def test_a_device_that_nobody_measured() -> None:
    """Five devices follow one model up to a factor each: they predict a sixth within their spread."""
    factors = {V100: 1.0, T4: 1.2, P100: 0.95, A100: 1.1, L4: 1.05}
    parts = []
    for number, (device, factor) in enumerate(factors.items()):
        rows = measured(device, seed=number, count=300)
        parts.append(contributed(measurements(rows.ops, rows.t_s * factor), device))
    settings = boosting.Settings(rounds=40, rate=0.2, in_leaf=20, seeds=2)
    (fitted,) = fitting.fit_across(list(samples.samples_of(parts)), settings=settings)
    assert fitted.facts.across
    assert len(fitted.facts.devices) == 5
    assert 0.1 < fitted.facts.half["add"] < 0.35
    fresh = measured(H100, seed=50)
    alone = (AnswerSource.LEARNED_ACROSS,)
    answers = Estimator(EMPTY, H100, alone, launch=True, models=models.in_memory([fitted])).estimate(fresh.ops)
    inside = answers.answered_by == AnswerSource.LEARNED_ACROSS
    assert inside.mean() > 0.9
    assert np.median(np.abs(answers.t_s / fresh.t_s - 1)[inside]) < 0.15
    assert ((answers.low_s <= fresh.t_s) & (fresh.t_s <= answers.high_s))[inside].mean() >= 0.9


def test_an_evaluation_learns_from_the_rest_alone(tmp_path: Path) -> None:
    parts = [(measured(d, seed=n, count=260), origin(d)) for n, d in enumerate((V100, T4, P100, A100, L4))]
    store = database(tmp_path / "db", *parts)
    seen: list[set[int]] = []

    def fit(rest: list[tuple[Provenance, Rows]]) -> list[Any]:
        seen.append({int(key) for _, rows in rest for key in rows.ops.keys})
        found = list(fitting.fit_across(list(samples.samples_of(rest)), settings=SMALL["elementwise"]))
        return list(models.in_memory(found))

    found = evaluate_unseen_devices(store, device=T4, sources=(AnswerSource.LEARNED_ACROSS,), fit=fit)
    own = {int(key) for key in parts[1][0].ops.keys}
    others = {int(key) for rows, where in parts if where.device.name != T4 for key in rows.ops.keys}
    assert seen[0] == others
    assert found.sources["learned_across"] > 0
    assert found.total.rows == len(own)
    assert [s.source for s in found.by_source] == sorted(
        {s.source for s in found.by_source}, key=lambda r: AnswerSource[r.upper()]
    )
    by_source = found.to_dict()["by_operator_and_source"]
    assert [row["source"] for row in by_source] == [s.source for s in found.by_source]
    evaluate(store, fit=lambda rest: seen.append({int(k) for _, r in rest for k in r.ops.keys}) or [])
    assert not seen[1] >= own


# -- the command line -----------------------------------------------------------------------------------------------


def report(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main(["opdb", *map(str, words), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_fit_and_query(own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU that no data sheet knows: without a model a new kind of addition has no answer, with one it has."""
    cpu = "cpu:some CPU x1"
    db = database(tmp_path / "db", (measured(cpu, count=300), origin(cpu))).folder
    query = ("query", "sub:elements=50000", "--device", cpu, "--db", db)
    assert main(["opdb", *map(str, query)]) == 1
    assert "expected measurements or a data sheet of cpu:some CPU x1" in capsys.readouterr().err
    said = report(capsys, "fit", "--db", db)
    assert [m["device"] for m in said["models"]] == [cpu]
    assert {f.suffix for f in (db / "models").iterdir()} == {".json", ".npz"}
    found = report(capsys, *query)
    assert found["answered_by"] == "learned"
    assert found["low_s"] < found["t_s"] < found["high_s"]
    assert main(["opdb", "fit", "--db", str(db), "--out", str(tmp_path / "shared")]) == 0
    assert "1 model written" in " ".join(capsys.readouterr().out.split())
    assert len(list((tmp_path / "shared").iterdir())) == 2


def test_fit_says_what_it_lacks(
    own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    db = database(tmp_path / "db", (measured(count=100), origin())).folder
    assert main(["opdb", "fit", "--db", str(db)]) == 1
    assert "expected 200 measurements or more" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "sklearn.ensemble", None)
    for words in (["fit"], ["evaluate", "--fit"]):
        assert main(["opdb", *words, "--db", str(db)]) == 1
        assert "scikit-learn" in capsys.readouterr().err


def test_evaluate_with_models(own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(count=400)
    odd = measurements(rows.ops, rows.t_s * np.where(rows.ops.integers["elements"] % 2 == 1, 1.6, 1.0))
    db = database(tmp_path / "db", (odd, origin())).folder
    found = report(capsys, "evaluate", "--db", db, "--fit")
    assert found["answered_by"].get("learned", 0) > 0
    without = report(capsys, "evaluate", "--db", db)
    assert without["answered_by"].get("learned", 0) == 0
    assert found["total"]["mape_pct"] < without["total"]["mape_pct"]


def test_what_ships_is_what_is_documented(tmp_path: Path) -> None:
    """Of aiconfigurator's rows one framework and version; whatever else a database holds is not shipped."""
    shipped = need("benchmarks.shipped_models")

    def product(device: str, tool: str, framework: str, version: str, dtype: str = "bf16") -> tuple[Provenance, Rows]:
        where: Origin = origin(device, method="graph_replay", launch=False)
        where = msgspec.structs.replace(
            where, environment=Environment(framework=framework, framework_version=version),
            source=msgspec.structs.replace(where.source, tool=tool),
        )  # fmt: skip
        ops = operators("matmul", {"batch": 1, "m": np.arange(1, 6), "n": 8, "k": 8}, name="linear", dtype=dtype)
        rows = measurements(ops, 1e-5)
        return provenance(rows, where), rows

    products = [
        product(H100, "aiconfigurator-core", "trtllm", "1.3.0rc20"),
        product(H100, "aiconfigurator-core", "trtllm", "1.3.0rc20", "int8"),
        product(H100, "aiconfigurator-core", "vllm", "0.24.0"),
        product("A100-SXM-80", "aiconfigurator-core", "trtllm", "1.3.0rc20"),
        product(V100, "neusight", "pytorch", "2.1.0", "fp32"),
        product(V100, "whatif", "pytorch", "2.1.0", "fp32"),
    ]
    p4 = product("P4", "neusight", "pytorch", "2.1.0", "fp32")
    # What the P4's sagging `linear` says is kept from others; what its other operators say is not.
    alone = shipped.chosen([p4, products[4], contributed(measured("P4"), "P4")])
    assert [len(s) for s in alone if s.kind.family == "matmul"] == [5, 5]
    assert [len(s) for s in shipped.transferable(alone) if s.kind.family == "matmul"] == [0, 5]
    found = {(s.device, s.kind.dtype, s.provenances[0].origin.source.tool) for s in shipped.chosen(products)}
    assert found == {(H100, "bf16", "aiconfigurator-core"), (V100, "fp32", "neusight")}
