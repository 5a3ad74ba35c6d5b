"""The chain of estimators: exact by hand, interpolation where the answer is known, ranges that hold, data sheets."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import loops_in_form
from tests.opdb.builders import T4, V100, indexed, origin, products, timed
from whatif.opdb.chain import METHOD_ORDER, Answers, AnswerSource, Estimator
from whatif.opdb.data_sheet import bound_s
from whatif.opdb.index import Index
from whatif.opdb.linear_model import fit_linear_model
from whatif.opdb.neighbours import nearest
from whatif.opdb.provenance import Environment
from whatif.opdb.rows import Operators, Rows, measurements, operators
from whatif.opdb.schema import METHODS
from whatif.opdb.work import work


def us(values: object) -> list[float]:
    return (np.asarray(values) * 1e6).tolist()


def ask(index: Index, ops: Operators, device: str = V100, **options: object) -> Answers:
    return Estimator(index, device, **options).estimate(ops)  # type: ignore[arg-type]


# -- exact ----------------------------------------------------------------------------------------------------------


def test_one_measurement_answers_with_the_spread_of_an_unknown_one() -> None:
    """10 us once; its spread is unknown, so 5 % is one sigma: 10·e^(±1.645·0.05)."""
    answers = ask(indexed((timed([8], [10.0]), origin())), products([8]))
    assert us(answers.t_s) == pytest.approx([10.0])
    assert us([answers.low_s[0], answers.high_s[0]]) == pytest.approx([9.2105, 10.8572], abs=1e-3)
    assert (answers.answered_by[0], answers.evidence[0]) == (AnswerSource.EXACT, 1)


def test_a_repeated_measurement_answers_with_its_own_spread() -> None:
    """10 to 90 % of the repeats between 9 and 11 us: sigma is 2 / 10 / 2.563 = 7.8 %."""
    rows = measurements(products([8]), 10e-6, t_low_s=9e-6, t_high_s=11e-6, repeats=50)
    answers = ask(indexed((rows, origin())), products([8]))
    sigma = 0.2 / 2.563
    wanted = [10 * np.exp(-1.645 * sigma), 10 * np.exp(1.645 * sigma)]
    assert us([answers.low_s[0], answers.high_s[0]]) == pytest.approx(wanted)


def test_conflicts_are_a_distribution() -> None:
    """Three sources, 10, 11 and 20 us, in one format: the median is 11, and the range holds all three."""
    parts = [(timed([8], [t]), origin(author=str(t))) for t in (20.0, 10.0, 11.0)]
    answers = ask(indexed(*parts), products([8]))
    assert us(answers.t_s) == pytest.approx([11.0])
    assert us(answers.low_s)[0] < 10.0
    assert us(answers.high_s)[0] > 20.0
    assert answers.evidence[0] == 3


def test_the_better_measurement_weighs_more() -> None:
    """10 us within 1 %, against 12 us within 20 % twice: the weights are 1 / 0.01^2 against 2 / 0.078^2."""
    sharp = measurements(products([8]), 10e-6, t_low_s=9.99e-6, t_high_s=10.01e-6)
    vague = [measurements(products([8]), 12e-6 + n * 1e-9, t_low_s=11e-6, t_high_s=13.4e-6) for n in range(2)]
    answers = ask(indexed((sharp, origin()), *((v, origin(author=str(n))) for n, v in enumerate(vague))), products([8]))
    assert us(answers.t_s) == pytest.approx([10.0])


def test_kernels_alone_come_before_launches_and_are_never_mixed() -> None:
    parts = [
        (timed([8], [30.0]), origin(method="event_pair", launch=True)),
        (timed([8], [3.0]), origin(method="graph_replay", launch=False)),
    ]
    index = indexed(*parts)
    answers = ask(index, products([8]))
    assert us(answers.t_s) == pytest.approx([3.0])
    assert answers.bases[answers.basis[0]] == ("graph_replay", "without launch", "unknown", "pytorch")
    assert us(ask(index, products([8]), method="event_pair").t_s) == pytest.approx([30.0])
    assert answers.high_s[0] < 4e-6
    assert sorted(METHOD_ORDER) == sorted(METHODS)


def test_what_the_device_was_measured_by_comes_before_what_others_were() -> None:
    index = indexed(
        (timed([8], [30.0]), origin(method="event_pair")), (timed([8], [3.0]), origin(T4, method="graph_replay"))
    )
    assert [basis.method for basis in ask(index, products([8])).bases] == ["event_pair", "graph_replay"]


def test_between_measurements_the_preferred_ones_are_asked_first() -> None:
    sizes = [8 * i for i in range(1, 41)]
    index = indexed(
        (timed(sizes, [30.0 + 0.1 * m for m in sizes]), origin(method="event_pair")),
        (timed(sizes, [3.0 + 0.1 * m for m in sizes]), origin(method="graph_replay", launch=False)),
    )
    answers = ask(index, products([100]))
    assert answers.answered_by.tolist() == [AnswerSource.INTERPOLATED]
    assert us(answers.t_s) == pytest.approx([13.0], rel=0.1)


def test_frameworks_are_never_mixed() -> None:
    """Two products of one framework and one of the other: the first answers by default, and either one on request."""
    torch, other = origin(), origin()
    other = msgspec.structs.replace(other, environment=Environment(framework="tensorflow"))
    index = indexed((timed([8, 9], [30.0, 31.0]), torch), (timed([8], [60.0]), other))
    answers = ask(index, products([8]))
    assert us(answers.t_s) == pytest.approx([30.0])
    assert answers.high_s[0] < 60e-6
    assert us(ask(index, products([8]), framework="tensorflow").t_s) == pytest.approx([60.0])
    assert [basis.framework for basis in answers.bases] == ["pytorch", "tensorflow"]


def test_another_devices_measurement_is_no_answer() -> None:
    index = indexed((timed([8], [10.0]), origin(T4)))
    answers = ask(index, products([8, 8]), "some GPU that nobody knows")
    assert np.isnan(answers.t_s).all()
    assert answers.answered_by.tolist() == [AnswerSource.NONE] * 2


def test_a_row_that_is_set_aside_does_not_answer() -> None:
    impossible = timed([10**8], [1.0])
    answers = ask(indexed((impossible, origin())), products([10**8]))
    assert answers.answered_by[0] == AnswerSource.ANALYTIC


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.floats(1, 1000)), min_size=1, max_size=25), st.integers(0, 10))
def test_exact_answers_are_those_of_a_slow_twin(rows: list[tuple[int, float]], seed: int) -> None:
    times = {m: sorted({t for n, t in rows if n == m}) for m, _ in rows}
    # Several contributions, so that equal rows of different people stay.
    index = indexed((timed([m for m, _ in rows], [t for _, t in rows]), origin()))
    asked = np.random.default_rng(seed).integers(1, 8, 12).tolist()
    answers = ask(index, products(asked), sources=(AnswerSource.EXACT,))
    for m, t, low, high in zip(asked, us(answers.t_s), us(answers.low_s), us(answers.high_s), strict=True):
        if m not in times:
            assert np.isnan(t)
            continue
        # Equal weights: the smallest time at which half of them is reached.
        assert t == pytest.approx(times[m][(len(times[m]) - 1) // 2])
        assert low == pytest.approx(times[m][0] * np.exp(-1.645 * 0.05))
        assert high == pytest.approx(times[m][-1] * np.exp(1.645 * 0.05))


def test_a_restricted_chain_answers_with_its_sources_and_leaves_the_whole_one_alone() -> None:
    """In either order: the answers of one are not reused for the other."""
    index, asked = indexed((timed([8], [10.0]), origin())), products([8, 8])
    for first_whole in (True, False):
        whole = Estimator(index, V100)
        sheet = whole.restricted((AnswerSource.ANALYTIC, AnswerSource.SAME_CHIP))
        for chain in (whole, sheet, whole) if first_whole else (sheet, whole, sheet):
            expected = AnswerSource.EXACT if chain is whole else AnswerSource.ANALYTIC
            answers = chain.estimate(asked)
            assert answers.answered_by.tolist() == [expected] * 2
            answers.t_s[:] = 1.0  # an answer is the asker's own: the next one is not changed
        assert us(whole.estimate(asked).t_s) == pytest.approx([10.0] * 2)


# -- the linear model and the neighbours ----------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-6, 1e-4), st.floats(1e11, 1e14), st.floats(1e10, 1e12), st.integers(0, 1000))
def test_the_linear_model_is_recovered(floor_s: float, flops_per_s: float, bytes_per_s: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    flops, moved = 10 ** random.uniform(5, 12, 400), 10 ** random.uniform(4, 10, 400)
    t_s = floor_s + flops / flops_per_s + moved / bytes_per_s
    again = fit_linear_model(flops, moved, t_s).time_s(flops, moved)
    assert np.abs(np.log(again / t_s)).max() < 0.02


def test_strays_do_not_move_the_linear_model() -> None:
    moved = np.geomspace(1e4, 1e9, 200)
    t_s = 5e-6 + moved / 5e11
    wild = t_s.copy()
    wild[::20] *= 30
    again = fit_linear_model(np.zeros(200), moved, wild).time_s(np.zeros(200), moved)
    assert np.abs(np.log(again / t_s)).max() < 0.02


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_the_compiled_neighbours_are_the_plain_ones(seed: int, axes: int) -> None:
    """On a grid, so that many distances are equal: ties go to the lower position in both."""
    random = np.random.default_rng(seed)
    measured = random.integers(0, 4, (40, axes)).astype(float)
    asked = random.integers(0, 5, (15, axes)).astype(float)
    itself = random.integers(-1, 40, 15)
    found = []
    for form in ("plain", "compiled"):
        with loops_in_form(form):
            found.append(nearest(measured, asked, 9, itself=itself))
    plain, compiled = found
    assert plain[0].tolist() == compiled[0].tolist()
    assert plain[1].tolist() == compiled[1].tolist()
    for row, own in enumerate(itself.tolist()):
        assert own not in plain[0][row]
        slow = sorted((float(((m - asked[row]) ** 2).sum()), n) for n, m in enumerate(measured) if n != own)[:9]
        assert plain[0][row].tolist() == [n for _, n in slow]
    assert nearest(measured, asked, 9)[1].max() < 10


# -- interpolation --------------------------------------------------------------------------------------------------


def elementwise(elements: object, name: str = "relu") -> Operators:
    return operators("elementwise", {"elements": elements, "tensors": 1}, name=name, dtype="fp32")  # type: ignore[dict-item]


def copied(elements: np.ndarray[tuple[int], np.dtype[np.int64]], noise: float = 0.0, seed: int = 0) -> Rows:
    """Elementwise operators that take 4 us and a byte a picosecond and a quarter (800 GB/s), and some noise."""
    t_s = 4e-6 + 8 * elements / 800e9
    noisy_s = t_s * np.exp(np.random.default_rng(seed).normal(0, noise, len(elements)))
    return measurements(elementwise(elements), noisy_s)


GRID = np.unique(np.geomspace(1e3, 1e8, 200).astype(np.int64))


def test_neighbours_on_the_linear_model_answer_by_it() -> None:
    index = indexed((copied(GRID), origin()))
    asked = np.array([1234, 99_999, 7_654_321, 77_777_777])
    answers = ask(index, elementwise(asked))
    assert answers.answered_by.tolist() == [AnswerSource.INTERPOLATED] * 4
    assert answers.t_s == pytest.approx(4e-6 + 8 * asked / 800e9, rel=0.01)
    assert answers.outside.tolist() == [0.0] * 4


def test_residuals_are_interpolated_between_neighbours() -> None:
    """Beyond 4 million elements everything is half as fast: neighbours show it, the linear model alone does not."""
    t_s = (4e-6 + 8 * GRID / 800e9) * np.where(GRID > 4_000_000, 2.0, 1.0)
    index = indexed((measurements(elementwise(GRID), t_s), origin()))
    asked = np.array([60_000, 50_000_000])
    wanted = (4e-6 + 8 * asked / 800e9) * np.array([1.0, 2.0])
    assert ask(index, elementwise(asked)).t_s == pytest.approx(wanted, rel=0.05)


def test_another_name_mode_format_or_method_is_no_neighbour() -> None:
    index = indexed((copied(GRID), origin("unknown GPU")))
    for ops in (
        elementwise([5000], name="gelu"),
        operators("elementwise", {"elements": 5000, "tensors": 2}, name="relu", dtype="fp32"),
        operators("elementwise", {"elements": 5000, "tensors": 1}, name="relu", dtype="fp16"),
    ):
        assert ask(index, ops, "unknown GPU").answered_by.tolist() == [AnswerSource.NONE]
    assert ask(index, elementwise([5000]), "unknown GPU", method="trace").answered_by.tolist() == [AnswerSource.NONE]
    assert ask(index, elementwise([5000]), "unknown GPU").answered_by.tolist() == [AnswerSource.INTERPOLATED]


def test_too_few_neighbours_are_none() -> None:
    assert ask(indexed((copied(GRID[:7]), origin())), elementwise([1100])).answered_by.tolist() == [
        AnswerSource.ANALYTIC
    ]
    assert ask(indexed((copied(GRID[:8]), origin())), elementwise([1100])).answered_by.tolist() == [
        AnswerSource.INTERPOLATED
    ]


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_ranges_hold_nine_of_ten(noise: float) -> None:
    """Half of 4,000 noisy measurements, estimated from the other half."""
    random = np.random.default_rng(3)
    elements = np.unique((10 ** random.uniform(3, 8, 4000)).astype(np.int64))
    rows = copied(elements, noise, seed=4)
    half = random.permutation(len(rows)) % 2 == 0
    answers = ask(indexed((rows.take(half), origin())), rows.ops.take(~half))
    measured = rows.t_s[~half]
    inside = (answers.low_s <= measured) & (measured <= answers.high_s)
    assert 0.87 <= inside.mean() <= 0.93
    # And they are not wide: a normal distribution's 90 % are 1.645 sigma, and the estimate itself has some noise.
    half_width = np.median(np.log(answers.high_s / answers.low_s)) / 2
    assert half_width < 1.645 * noise * 1.25


def test_strays_and_conflicts_widen_the_range() -> None:
    """An unmeasured operator may be a stray as well, or be run by the other library."""
    clean = copied(GRID, 0.01)
    odd = measurements(clean.ops, clean.t_s * np.where(np.arange(len(GRID)) % 5 == 0, 1.6, 1.0))
    alone = ask(indexed((clean, origin())), elementwise([123_456]))
    both = ask(indexed((clean, origin()), (odd, origin(author="other library"))), elementwise([123_456]))
    assert both.high_s[0] / both.low_s[0] > alone.high_s[0] / alone.low_s[0]


def test_the_range_grows_outside_and_the_data_sheet_takes_over() -> None:
    random = np.random.default_rng(1)
    m = np.unique((2 ** random.uniform(5, 11, 300)).astype(np.int64))
    ops = operators("matmul", {"batch": 1, "m": m, "n": 1024, "k": 1024}, name="linear", dtype="fp32")
    flops, moved = work(ops)
    rows = measurements(ops, (5e-6 + flops / 12e12 + moved / 8e11) * np.exp(random.normal(0, 0.03, len(m))))
    index = indexed((rows, origin()))
    asked = operators("matmul", {"batch": 1, "m": [2**n for n in range(10, 26)], "n": 1024, "k": 1024},
                      name="linear", dtype="fp32")  # fmt: skip
    answers = ask(index, asked)
    ratio = answers.high_s / answers.low_s
    inside = answers.answered_by == AnswerSource.INTERPOLATED
    assert inside[0]
    assert not inside[-1]
    assert (np.diff(inside.astype(int)) <= 0).all()  # once it has taken over, it stays
    assert (np.diff(ratio[inside & (answers.outside > 0)]) > 0).all()
    assert (answers.outside > 0).sum() >= 3
    assert np.diff(answers.outside[answers.outside > 0]) == pytest.approx(1)
    assert answers.outside[~inside].tolist() == [0.0] * int((~inside).sum())


def test_memory_is_not_guessed_from_the_cache() -> None:
    """All that was measured fits the 6 MB of a V100's cache, at 3 TB/s; the memory has 0.9."""
    elements = np.unique(np.geomspace(1e3, 7e5, 100).astype(np.int64))
    rows = measurements(elementwise(elements), 3e-6 + 8 * elements / 3e12)
    asked = elementwise([10**6, 10**8])
    answers = ask(indexed((rows, origin())), asked)
    assert answers.answered_by.tolist() == [AnswerSource.ANALYTIC] * 2
    from whatif.hardware.gpu import load_gpu

    assert (answers.t_s >= bound_s(load_gpu(V100), asked, cold=False)).all()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=30), st.integers(0, 5))
def test_every_answer_has_a_range_around_it(elements: list[int], seed: int) -> None:
    index = indexed((copied(GRID, 0.05, seed), origin()))
    answers = ask(index, elementwise(elements))
    assert (answers.answered_by != AnswerSource.NONE).all()
    assert (answers.low_s > 0).all()
    assert (answers.low_s <= answers.t_s).all()
    assert (answers.t_s <= answers.high_s).all()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=20))
def test_an_answer_does_not_depend_on_what_else_is_asked(elements: list[int]) -> None:
    index = indexed((copied(GRID, 0.05), origin()))
    together = ask(index, elementwise(elements))
    for place, one in enumerate(elements):
        alone = ask(index, elementwise([one]))
        assert alone.t_s[0] == pytest.approx(together.t_s[place], rel=1e-12)
        assert alone.answered_by[0] == together.answered_by[place]


def test_a_collective_is_interpolated_else_nccls_tuner_answers() -> None:
    sizes = 2 ** np.arange(10, 30)
    ops = operators("collective", {"bytes": sizes, "ranks": 8, "nodes": 1}, name="all_reduce", dtype="fp16")
    index = indexed((measurements(ops, 15e-6 + sizes / 130e9), origin("A100-SXM-80", method="wall", launch=None)))
    one = operators("collective", {"bytes": 3 * 2**20, "ranks": [8, 4], "nodes": 1}, name="all_reduce", dtype="fp16")
    answers = ask(index, one, "A100-SXM-80")
    assert answers.answered_by.tolist() == [
        AnswerSource.INTERPOLATED,
        AnswerSource.ANALYTIC,
    ]  # no other number of ranks was measured
    assert answers.t_s[0] == pytest.approx(15e-6 + 3 * 2**20 / 130e9, rel=0.03)
