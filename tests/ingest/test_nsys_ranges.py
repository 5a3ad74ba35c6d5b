"""NVTX ranges: which are operators, marks, steps and layers, and what stays a mere label."""

from __future__ import annotations

from pathlib import Path

import pytest

import whatif
from tests.ingest.nsys_report import PID, Report, global_id
from whatif import Phase
from whatif.ingest.events import EventCategory, Events
from whatif.ingest.nsys import read_nsys
from whatif.ingest.nsys_names import RangeKind, read_text

LAYER = "whatif::layer::"


@pytest.mark.parametrize(
    ("text", "name", "sequence", "dims"),
    [
        ("aten::conv2d, seq = 12, sizes = [[8, 3, 32, 32], [16, 3, 3, 3], []]", "aten::conv2d", 12,
         [[8, 3, 32, 32], [16, 3, 3, 3], []]),
        ("aten::empty", "aten::empty", -1, None),
        ("aten::add_, op_id = 18667", "aten::add_", -1, None),
        ("AddmmBackward0, seq = 7, op_id = 4, sizes = [], input_op_ids = [(3,0)]", "AddmmBackward0", 7, []),
        ("MyFunctionBackward", "MyFunctionBackward", -1, None),
        ("my_extension, op_id = 3", "my_extension", -1, None),
        ("Torch-Compiled Region: 0/0", "Torch-Compiled Region: 0/0", -1, None),
        ("aten::mm, sizes = [[1, nan]]", "aten::mm", -1, None),
        ("aten::mm, seq = 99999999999999999999999", "aten::mm, seq = 99999999999999999999999", -1, None),
    ],
)  # fmt: skip
def test_operators_of_emit_nvtx(text: str, name: str, sequence: int, dims: object) -> None:
    read = read_text(text)
    assert (read.kind, read.name, read.sequence, read.dims) == (RangeKind.OPERATOR, name, sequence, dims)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ProfilerStep#3", RangeKind.MARK),
        ("Optimizer.step#Adam.step, op_id = 5", RangeKind.MARK),
        ("whatif::layer::features.0", RangeKind.MARK),
        ("nn.Module: Linear_0", RangeKind.MARK),
        ("step 12", RangeKind.STEP),
        ("Iteration", RangeKind.STEP),
        ("train_step", RangeKind.STEP),
        ("iter=4", RangeKind.STEP),
        (":batch_7", RangeKind.STEP),
        ("opt.step()", RangeKind.UPDATE),
        ("zero_grad", RangeKind.ZERO_GRAD),
        ("data loading", RangeKind.LOADING),
        ("Forward pass", RangeKind.PHASE),
        ("Backward", RangeKind.PHASE),
        ("stepwise attention", RangeKind.USER),
        ("encoder.layer.0", RangeKind.USER),
        ("batch_norm", RangeKind.USER),
        ("", RangeKind.USER),
    ],
)
def test_words_around_the_parts_of_a_step(text: str, kind: RangeKind) -> None:
    assert read_text(text).kind == kind


def test_a_long_text_is_read_in_time_that_grows_with_it() -> None:
    """A pattern that backtracks would need hours for these."""
    for text in (", sizes = [" * 200_000, "step" + "-" * 1_000_000, "a" * 2_000_000 + "Backward"):
        assert read_text(text).sequence == -1


def annotations(events: Events) -> list[str]:
    chosen = events.category == EventCategory.ANNOTATION
    return [events.names[code] for code in events.name[chosen].tolist()]


def three_steps(step: str = "step {}", *, inside: tuple[tuple[int, int, str], ...] = ()) -> Report:
    """Three steps of 1 ms; the calls of each launch a kernel at 100, 300 and 700 us; ``inside`` are ranges in us."""
    report = Report()
    for number in range(3):
        t = 1_000_000 * number
        report.range(t, t + 990_000, step.format(number))
        for start, end, text in inside:
            report.range(t + 1_000 * start, t + 1_000 * end, text.format(number))
        for offset in (100, 300, 700):
            at, correlation = t + 1_000 * offset, 1_000 * number + offset
            report.call(at, at + 5_000, "cudaLaunchKernel_v7000", correlation)
            report.kernel(at + 8_000, at + 90_000, f"k{offset}", correlation)
    return report


def test_nested_ranges_in_a_step_are_layers_by_their_path(tmp_path: Path) -> None:
    report = three_steps(inside=(
        (50, 600, "forward"), (60, 500, "encoder"), (70, 200, "attention"), (250, 400, "encoder.mlp"),
        (650, 800, "head"),
    ))  # fmt: skip
    graph = whatif.read(report.write(tmp_path / "r.sqlite"))
    layer = {graph.names[graph.name[i]]: graph.layers[graph.layer[i]] for i in range(len(graph)) if graph.on_gpu[i]}
    assert layer == {"k100": "encoder.attention", "k300": "encoder.mlp", "k700": "head"}
    assert graph.info.n_steps == 3


def test_the_recorders_own_layers_keep_their_names(tmp_path: Path) -> None:
    report = three_steps(inside=((50, 600, f"{LAYER}features"), (60, 200, f"{LAYER}features.0")))
    graph = whatif.read(report.write(tmp_path / "r.sqlite"))
    assert set(graph.layers) == {"", "features", "features.0"}


def test_updates_loading_and_what_lies_in_them_are_no_layers(tmp_path: Path) -> None:
    report = three_steps(inside=(
        (20, 60, "data"), (25, 40, "decode"), (80, 400, "model"), (650, 900, "optimizer.step"), (660, 850, "clip"),
    ))  # fmt: skip
    path = report.write(tmp_path / "r.sqlite")
    assert set(annotations(read_nsys(path))) == {
        "ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2", "enumerate(DataLoader)#data", "decode", f"{LAYER}model",
        "Optimizer.step#", "clip",
    }  # fmt: skip
    graph = whatif.read(path)
    phase = {graph.names[graph.name[i]]: Phase(int(graph.phase[i])) for i in range(len(graph)) if graph.on_gpu[i]}
    assert phase == {"k100": Phase.FORWARD, "k300": Phase.FORWARD, "k700": Phase.UPDATE}
    assert graph.info.optimizer is None


def test_a_step_in_name_only_is_no_training_step(tmp_path: Path) -> None:
    """ "step" around the optimizer's step fills a fifth of the time; "iteration" fills it all."""
    report = three_steps("iteration", inside=((650, 850, "step"), (80, 400, "model")))
    found = annotations(read_nsys(report.write(tmp_path / "r.sqlite")))
    assert found.count("step") == 3
    assert [name for name in found if name.startswith("ProfilerStep#")] == [f"ProfilerStep#{i}" for i in range(3)]


def test_of_nested_step_names_the_outermost_counts(tmp_path: Path) -> None:
    report = three_steps("iteration {}", inside=((10, 480, "batch 0"), (490, 980, "batch 1")))
    found = annotations(read_nsys(report.write(tmp_path / "r.sqlite")))
    assert sum(name.startswith("ProfilerStep#") for name in found) == 3
    assert {"batch 0", "batch 1"} <= set(found)


def test_the_profilers_own_steps_win(tmp_path: Path) -> None:
    report = three_steps("ProfilerStep#{}", inside=((0, 990, "batch"),))
    found = annotations(read_nsys(report.write(tmp_path / "r.sqlite")))
    assert found.count("batch") == 3
    assert whatif.read(tmp_path / "r.sqlite").info.n_steps == 3


def test_a_name_of_one_step_alone_is_neither_a_layer_nor_part_of_one(tmp_path: Path) -> None:
    report = three_steps(inside=((40, 900, "loop at {}"), (80, 400, "encoder")))
    report.range(-5, 5_000_000, "epoch 1")
    graph = whatif.read(report.write(tmp_path / "r.sqlite"))
    assert set(graph.layers) == {"", "encoder"}


def test_ranges_of_libraries_and_ranges_across_threads_are_left_out(tmp_path: Path) -> None:
    report = three_steps()
    report.range(80_000, 200_000, "ncclAllReduce", domain=1)
    report.add("NVTX_EVENTS", start=80_000, end=200_000, eventType=60, text="step 9", globalTid=global_id(PID, 1),
               endGlobalTid=global_id(PID, 2), domainId=0)  # fmt: skip
    report.range(90_000, 90_000, "a mark", kind=34)
    found = annotations(read_nsys(report.write(tmp_path / "r.sqlite")))
    assert set(found) == {f"ProfilerStep#{i}" for i in range(3)}


def test_registered_strings_are_texts_as_well(tmp_path: Path) -> None:
    report = Report()
    report.call(100, 110, "cudaLaunchKernel_v7000", 1)
    report.kernel(120, 130, "k", 1)
    report.range(50, 200, f"{LAYER}fc", registered=True)
    assert annotations(read_nsys(report.write(tmp_path / "r.sqlite"))) == [f"{LAYER}fc"]


def test_shapes_of_operators_reach_the_columns(tmp_path: Path) -> None:
    report = Report()
    report.range(50, 200, "aten::mm, op_id = 3, sizes = [[64, 32], [32, 16]]")
    report.range(210, 300, "aten::mm, op_id = 4, sizes = [[64, 32], [32, 16]]")
    report.call(100, 110, "cudaLaunchKernel_v7000", 1)
    report.kernel(120, 130, "k", 1)
    path = report.write(tmp_path / "r.sqlite")
    events = read_nsys(path)
    assert events.shapes == [([[64, 32], [32, 16]], None, None)]
    assert (events.shape[events.category == EventCategory.CPU_OP] == 0).all()


def test_a_backward_operator_takes_the_layer_of_its_forward_one(tmp_path: Path) -> None:
    report = Report()
    report.range(0, 100_000, f"{LAYER}fc")
    report.range(10_000, 90_000, "aten::addmm, seq = 5, op_id = 1")
    report.call(20_000, 25_000, "cudaLaunchKernel_v7000", 1)
    report.kernel(27_000, 60_000, "f", 1)
    report.range(200_000, 300_000, "autograd::engine::evaluate_function: AddmmBackward0, seq = 5, op_id = 2", tid=2)
    report.range(210_000, 290_000, "AddmmBackward0, seq = 5, op_id = 3", tid=2)
    report.call(220_000, 225_000, "cudaLaunchKernel_v7000", 2, tid=2)
    report.kernel(227_000, 280_000, "b", 2)
    graph = whatif.read(report.write(tmp_path / "r.sqlite"))
    found = {
        graph.names[graph.name[i]]: (graph.layers[graph.layer[i]], Phase(int(graph.phase[i])))
        for i in range(len(graph))
        if graph.on_gpu[i]
    }
    assert found == {"f": ("fc", Phase.FORWARD), "b": ("fc", Phase.BACKWARD)}
