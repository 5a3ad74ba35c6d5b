"""NeuSight's 256,509 measurements, if available: the whole import, and the estimators' errors on them."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import extra_data, need, replace
from tests.opdb.builders import own_cache
from whatif.hardware.gpu import load_gpu
from whatif.opdb.analytic import analytic_answers
from whatif.opdb.asking import ask, parse_operator
from whatif.opdb.chain import ALL_SOURCES, AnswerSource
from whatif.opdb.evaluate import SEED, SHARE, estimate_rows, evaluate, evaluate_unseen_devices, split
from whatif.opdb.importing import add_found, read_foreign
from whatif.opdb.index import index_of, open_index, read_contributions
from whatif.opdb.keys import held_out
from whatif.opdb.learned import shipped_models
from whatif.opdb.merging import merge
from whatif.opdb.provenance import Provenance
from whatif.opdb.rows import Rows
from whatif.opdb.store import Store

pytestmark = pytest.mark.slow

__all__ = ["own_cache"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A database of all of it."""
    archive = extra_data("opdata", "neusight", "train_collect.tar.gz")
    made = Store.open(tmp_path_factory.mktemp("neusight") / "db", create=True)
    found = read_foreign("neusight", archive)
    assert not found.dropped
    assert add_found(found, made).rows == 256_509
    return made


@pytest.fixture(scope="module")
def contributions(store: Store) -> list[tuple[Provenance, Rows]]:
    """All that it holds."""
    found, wrong = read_contributions(store)
    assert wrong == []
    return found


def test_every_measurement_is_there(contributions: list[tuple[Provenance, Rows]]) -> None:
    """The counts of its catalogue: 87,623 bmm, 32,224 linear, 24,662 conv, 11 elementwise of 8,750 each, ..."""
    names = np.concatenate([rows.ops.texts["name"].decoded() for _, rows in contributions])
    counts = dict(zip(*map(np.ndarray.tolist, np.unique(names, return_counts=True)), strict=True))
    assert (counts["bmm"], counts["linear"], counts["conv2d"]) == (87_623, 32_224, 24_662)
    assert (counts["softmax"], counts["layer_norm"]) == (8_750, 7_000)
    assert sum(count == 8_750 for name, count in counts.items() if name != "softmax") == 11
    devices = {said.origin.device.name for said, _ in contributions}
    assert devices == {"P4", "P100-PCIE-16", "V100-PCIE-32", "T4", "A100-PCIE-40", "A100-PCIE-80"}


def test_the_models_that_ship_were_learned_from_these_very_rows(
    contributions: list[tuple[Provenance, Rows]], tmp_path: Path
) -> None:
    """What would be fitted again: an importer that changes makes the models stale.

    The overhead that is taken out of convolutions is fitted, and its last bits depend on the machine's linear algebra.
    """
    samples = need("whatif.instrumentation.estimators.samples")
    shipped = {
        (facts.device, facts.family): (facts.rows, "" if facts.family == "conv" else facts.data_sha256)
        for facts in (model.facts for model in shipped_models())
        if not facts.across and facts.sources[0].name == "neusight"
    }
    amd = Store.open(tmp_path / "amd", create=True)
    with tarfile.open(extra_data("opdata", "neusight", "amd_train.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    for name in ("elem", "ln", "softmax"):
        add_found(read_foreign("neusight", tmp_path / "amd_train" / f"{name}.csv"), amd)
    found = {
        (one.device, one.kind.family): (
            len(one),
            "" if one.kind.family == "conv" else hashlib.sha256(one.sha256().encode()).hexdigest(),
        )
        for one in samples.samples_of([*contributions, *read_contributions(amd)[0]])
    }
    assert len(shipped) == 24
    assert found == shipped


def test_unseen_shapes_of_a_v100(store: Store) -> None:
    """Ten percent held out, Tianshu's protocol; its own data gave .57 (Add), 2.92 (MatMul), 8.94 (Conv2D).

    The bounds leave room above what was reached: they guard against a break, docs/opdb.md has the numbers.
    """
    found = evaluate(store, device="V100-PCIE-32")
    score = {s.name: s for s in found.by_operator}
    for name in ("add", "mul", "div", "relu", "gelu", "tanh"):
        assert score[name].mape_pct <= 1.0
    assert score["linear"].mape_pct <= 6.5
    assert score["bmm"].mape_pct <= 8.5
    assert score["conv2d"].mape_pct <= 18.0
    assert score["layer_norm"].mape_pct <= 2.5
    assert 87 <= found.total.coverage_pct <= 93
    assert sum(found.sources.values()) == found.held_out


def test_learned_convolutions_of_a_v100(store: Store, tmp_path: Path) -> None:
    """Tianshu printed 8.94 % for Conv2D on its own data; docs/estimators.md has what is reached here."""
    need("sklearn")
    models = need("whatif.instrumentation.estimators.models")
    part = Store.open(tmp_path / "conv", create=True)
    merge(store, part, family="conv", device="V100-PCIE-32")
    found = evaluate(part, fit=lambda rest: models.in_memory(models.fit_models(rest, across=False)))
    assert found.sources == {"learned": found.held_out}
    assert found.total.mape_pct <= 10.0
    assert 86 <= found.total.coverage_pct <= 95


def test_convolutions_of_an_unseen_device(store: Store, tmp_path: Path) -> None:
    """Each of five GPUs from the other four; the data sheet's errors are larger.

    Before the importer took out an overhead that grew on all of them alike it was 17 %: what they shared was easy.
    """
    part = Store.open(tmp_path / "conv", create=True)
    merge(store, part, family="conv")
    found = evaluate_unseen_devices(part)
    assert found.held_out == found.rows == 24_662
    assert found.sources["same_shape"] > 24_000  # the others have too few devices
    assert found.total.mape_pct <= 17.0  # 15.8; the same shape alone 20.2
    assert 88 <= found.total.coverage_pct <= 97


def test_nothing_held_out_is_learned_from(contributions: list[tuple[Provenance, Rows]]) -> None:
    """Held-out times made a thousandfold leave every estimate as it was."""
    [(said, rows)] = [(c, r) for c, r in contributions if c.origin.device.name == "T4" and c.family == "normalization"]
    slow = replace(rows, t_s=np.where(held_out(rows.ops.keys, SEED, SHARE), 1000.0, 1.0) * rows.t_s)
    estimates = []
    for whole in (rows, slow):
        kept, [(_, tested)] = split([(said, whole)], SEED, SHARE)
        assert len(tested) + len(kept[0][1]) == len(rows)
        index = index_of(kept)
        assert np.isnan(estimate_rows(index, said, tested, (AnswerSource.EXACT,)).t_s).all()
        estimates.append(estimate_rows(index, said, tested, ALL_SOURCES).t_s.tolist())
    assert estimates[0] == estimates[1]
    assert tested.t_s.min() > 1000 * rows.t_s.min()


def test_a_measured_operator_answers_with_its_measurement(store: Store, tmp_path: Path, own_cache: Path) -> None:
    part = Store.open(tmp_path / "v100", create=True)
    merge(store, part, device="V100-PCIE-32")
    index = open_index(part)
    reply = ask(index, parse_operator("bmm:batch=13,m=27,n=29,k=15"), "V100-PCIE-32")
    assert reply.answered_by == "exact"
    assert reply.t_s == pytest.approx(0.04125866542259852e-3)  # the first row of its table
    assert reply.measurements[0].contribution["licence"] == "MIT"
    assert ask(index, parse_operator("bmm:batch=13,m=27,n=29,k=16"), "V100-PCIE-32").answered_by == "interpolated"
    assert ask(index, parse_operator("bmm:batch=13,m=27,n=29,k=15"), "H100-SXM-80").answered_by == "analytic"


def test_the_instruction_queue_misses_less_than_the_roofline_on_gpus_that_chose_nothing(store: Store) -> None:
    """Convolutions from hardware facts alone: 32.3, 27.7, 25.1 and 30.3 %; the roofline model's errors are 29 to 40 %.

    Its DOP was chosen on the V100's rows; a twentieth of them here.
    """
    contributions = [c for c in store.contributions()[0] if c.provenance.family == "conv"]
    assert len(contributions) == 5
    for contribution in contributions:
        rows = contribution.read()
        rows = rows.take(np.arange(0, len(rows), 20))
        gpu = load_gpu(contribution.provenance.origin.device.name)
        t, low, high = analytic_answers(gpu, rows.ops, launch=True)
        roofline, _, _ = analytic_answers(gpu, rows.ops, launch=True, conv_law="roofline")
        missed, roofline_missed = (float(np.mean(np.abs(estimated / rows.t_s - 1))) for estimated in (t, roofline))
        assert missed < min(roofline_missed, 0.36)
        assert np.mean((rows.t_s >= low) & (rows.t_s <= high)) > 0.8
