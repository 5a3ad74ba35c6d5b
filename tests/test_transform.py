"""Loading a transform script: what is found, what is refused and in which words, options from text, composition."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import CPU, STREAM, Build, read_events, step
from tests.helpers import launched as launched_events
from whatif import Frontier, TaskGraph, Transform, WhatifError, apply, load_transform, read_ranks, simulate
from whatif.prediction.transform import built_in_names, parse_spec

HEADER = '"""Mine: what I think.\n\nSource: nowhere.\n"""\n'
SIGNATURE = r"transform\(graph, \*, "


def script(folder: Path, body: str, name: str = "mine.py", header: str = HEADER) -> str:
    path = folder / name
    path.write_text(header + body)
    return str(path)


def graph() -> TaskGraph:
    build = Build(CPU, STREAM)
    build.launch(1, 10, "k")
    return build.graph()


@pytest.fixture
def recorded(tmp_path: Path) -> TaskGraph:
    return read_events(tmp_path, launched_events("k", 0, 3, 5, 10, 1))


# -- found ---------------------------------------------------------------------------------------------------------


def test_a_built_in_transform_is_found_by_its_name() -> None:
    transform = load_transform("scale:kind=gpu,factor=0.5")
    assert (transform.name, transform.options) == ("scale", {"kind": "gpu", "factor": 0.5})
    assert transform.summary.startswith("Scale: ")
    assert transform(graph()).duration_ns.tolist() == [1, 5]


@pytest.mark.parametrize("name", built_in_names())
def test_every_built_in_transform_loads_and_names_its_source_and_model(name: str) -> None:
    transform = load_transform(name)
    assert "Source:" in transform.doc
    assert "Model:" in transform.doc


def test_a_script_is_found_by_its_path(tmp_path: Path) -> None:
    path = script(tmp_path, "def transform(graph, *, factor: float = 3.0): return graph.scale(graph.on_gpu, factor)")
    for spec in (path, Path(path)):
        transform = load_transform(spec)
        assert (transform.name, transform.summary) == ("mine", "Mine: what I think.")
        assert transform(graph()).duration_ns.tolist() == [1, 30]
    assert load_transform(f"{path}:factor=2")(graph()).duration_ns.tolist() == [1, 20]
    assert load_transform(path, factor=4)(graph()).duration_ns.tolist() == [1, 40]


def test_a_script_may_define_dataclasses_and_postpone_its_annotations(tmp_path: Path) -> None:
    body = """
from __future__ import annotations
from dataclasses import dataclass
from whatif import TaskGraph

@dataclass
class Plan:
    factor: float = 2.0

def transform(graph: TaskGraph, *, factor: float = Plan().factor) -> TaskGraph:
    return graph.scale(graph.on_gpu, factor)
"""
    assert load_transform(script(tmp_path, body) + ":factor=1.5")(graph()).duration_ns.tolist() == [1, 15]


def test_two_scripts_of_one_name_stay_apart(tmp_path: Path) -> None:
    paths = []
    for factor in (2, 3):
        (tmp_path / str(factor)).mkdir()
        body = f"def transform(graph): return graph.scale(graph.on_gpu, {factor})"
        paths.append(script(tmp_path / str(factor), body))
    first, second = (load_transform(path) for path in paths)
    assert [t(graph()).duration_ns[1] for t in (first, second)] == [20, 30]


@pytest.mark.parametrize(
    ("name", "message"),
    [("amp+fused_adam", "to combine them, write amp fused_adam"),
     ("scal", "no transform 'scal'; did you mean 'scale'"), ("qqqqqq", r"see `whatif transforms`, or give the path"),
     ("", "no transform ''"), ("__init__", "no transform"), ("./nowhere.py", r"nowhere.py: .*no such file")],
)  # fmt: skip
def test_an_unknown_name_gets_a_hint(name: str, message: str) -> None:
    with pytest.raises(WhatifError, match=message):
        load_transform(name)


@pytest.mark.parametrize(
    ("name", "what"), [("expert_parallel", "expert parallelism"), ("context_parallel", "context parallelism")]
)
def test_parallelism_without_measurements_is_refused_by_name(name: str, what: str) -> None:
    with pytest.raises(WhatifError, match=f"^{name}: {what} is not modelled, since no measurements of it are at hand"):
        load_transform(f"{name}:workers=8")


# -- options -------------------------------------------------------------------------------------------------------

OPTIONS = """
from pathlib import Path
from typing import Literal
def transform(graph, *, count: int = 1, rate: float = 1.0, on: bool = False, text: str = "", path: Path = Path("."),
              some: int | None = 3, mode: Literal["a", "b", 3] = "a", either: int | str = 0): return graph
"""


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [("count", "7", 7), ("rate", "1e-3", 1e-3), ("rate", "2", 2.0), ("on", "yes", True), ("on", "False", False),
     ("text", "a=b", "a=b"), ("text", "x,y", "x,y"), ("path", "/tmp", Path("/tmp")), ("some", "None", None),
     ("some", "4", 4), ("mode", "b", "b"), ("mode", "3", 3), ("either", "5", 5), ("either", "five", "five")],
)  # fmt: skip
def test_options_from_text_take_the_type_of_their_annotation(
    tmp_path: Path, option: str, text: str, value: Any
) -> None:
    found = load_transform(f"{script(tmp_path, OPTIONS)}:{option}={text}").options[option]
    assert found == value
    assert type(found) is type(value) or isinstance(value, Path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("count=1.5", "count: expected int, got '1.5'"), ("rate=fast", "rate: expected float, got 'fast'"),
     ("on=maybe", "on: expected bool, got 'maybe'"), ("mode=c", "mode: expected one of a, b, 3, got 'c'"),
     ("some=x", "some: expected int, got 'x'"), ("coutn=1", "no option 'coutn'; did you mean 'count'"),
     ("zzz=1", "no option 'zzz'; it takes: count, rate"), ("count=1,count=2", "'count' is given twice"),
     ("count", "expected options as name:option=value"), ("=3", "expected options as name:option=value"),
     ("", "expected options as name:option=value"), ("2x=3", "expected options as name:option=value")],
)  # fmt: skip
def test_an_option_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(WhatifError, match=message):
        load_transform(f"{script(tmp_path, OPTIONS)}:{text}")


@pytest.mark.parametrize("factor", ["nan", "inf", "-1"])
def test_a_factor_that_is_none_is_refused_when_applied(factor: str, recorded: TaskGraph) -> None:
    with pytest.raises(WhatifError, match="factor of 0 or more"):
        apply(recorded, f"scale:factor={factor}")


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [("amp", "amp", {}),
     ("scale:factor=2", "scale", {"factor": "2"}),
     ("scale:name=a{1,2},factor=2", "scale", {"name": "a{1,2}", "factor": "2"}),
     ("scale:name=gemm|conv,layer=^x,y$", "scale", {"name": "gemm|conv", "layer": "^x,y$"}),
     ("scale:name=a::b", "scale", {"name": "a::b"}),
     ("scale:name=", "scale", {"name": ""}),
     ("scale:name=a==b", "scale", {"name": "a==b"}),
     (r"C:\mine.py", r"C:\mine.py", {}),
     (r"C:\mine.py:rate=2", r"C:\mine.py", {"rate": "2"}),
     ("C:/mine.py:rate=2,on=C:/x", "C:/mine.py", {"rate": "2", "on": "C:/x"}),
     ("./mine.py:rate=2", "./mine.py", {"rate": "2"})],
)  # fmt: skip
def test_specs_are_split_where_an_option_begins(spec: str, name: str, options: dict[str, str]) -> None:
    assert parse_spec(spec) == (name, options)


# -- refused -------------------------------------------------------------------------------------------------------

MALFORMED = {
    "no docstring": ("", "def transform(graph): return graph", "expected a docstring"),
    "no function": (HEADER, "x = 1", r"expected a function transform\(graph, \*, options\)"),
    "not callable": (HEADER, "transform = 3", r"expected a function transform\("),
    "positional options": (HEADER, "def transform(graph, factor: float = 1.0): return graph",
                           SIGNATURE + r".*got transform\(graph, factor: float = 1.0\)"),
    "options without defaults": (HEADER, "def transform(graph, *, factor: float): return graph", SIGNATURE),
    "options without types": (HEADER, "def transform(graph, *, factor=1.0): return graph", SIGNATURE),
    "any options": (HEADER, "def transform(graph, **options): return graph", SIGNATURE),
    "any positions": (HEADER, "def transform(*graphs): return graphs[0]", SIGNATURE),
    "no graph": (HEADER, "def transform(): return None", SIGNATURE),
    "a syntax error": (HEADER, "def transform(graph) return graph", "SyntaxError"),
    "an error at import": (HEADER, "raise ValueError('boom')", "could not be run: ValueError: boom"),
    "a missing import": (HEADER, "import no_such_module", "could not be run: ModuleNotFoundError"),
    "an exit at import": (HEADER, "raise SystemExit(3)", "could not be run: SystemExit"),
    "an unknown annotation": (HEADER, "def transform(graph: 'Nothing'): return graph", "annotations of transform"),
    "an annotation that is no name": (HEADER, "import math\ndef transform(graph: 'math.nothing'): return graph",
                                      "annotations of transform"),
    "an annotation that is no Python": (HEADER, "def transform(graph: 'a b'): return graph",
                                        "annotations of transform"),
    "an option that no text can be": (HEADER, "def transform(graph, *, sizes: list[int] = [1]): return graph",
                                      r"expected option 'sizes' of type int, .*got transform\(graph, \*, sizes: list"),
    "a default of another type": (HEADER, "def transform(graph, *, n: int = 'x'): return graph",
                                  r"default of the option's own type, got n='x' in transform\(graph, \*, n: int"),
    "a default that is no choice": (HEADER, "from typing import Literal as L\n"
                                    "def transform(graph, *, n: L['a'] = 'c'): return graph", "own type, got n='c'"),
    "a default that is none": (HEADER, "def transform(graph, *, n: float = None): return 1", "own type, got n=None"),
    "a schedule without frontier": (HEADER, "def transform(graph): return graph\ndef schedule(): return 0",
                                    r"expected schedule\(frontier\) -> int, got schedule\(\)\.$"),
    "a priority of two": (HEADER, "def transform(graph): return graph\ndef priority(graph, x): return 0",
                          r"expected priority\(graph\) -> array and no schedule, got priority\(graph, x\)\.$"),
    "a schedule that is no function": (HEADER, "def transform(graph): return graph\nschedule = 3",
                                       r"expected schedule\(frontier\)"),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_script_is_refused_in_one_sentence(what: str, tmp_path: Path) -> None:
    header, body, message = MALFORMED[what]
    path = script(tmp_path, body, header=header)
    with pytest.raises(WhatifError, match=message) as error:
        load_transform(path)
    assert path in str(error.value)


@pytest.mark.parametrize("returned", ["None", "3", "graph.scale"])
def test_a_script_that_returns_no_graph_is_reported(returned: str, tmp_path: Path) -> None:
    transform = load_transform(script(tmp_path, f"def transform(graph): return {returned}"))
    with pytest.raises(WhatifError, match=r"expected transform\(\) to return a TaskGraph, got"):
        transform(graph())


def test_a_script_that_returns_the_result_of_insert_is_told_where_the_graph_is(tmp_path: Path) -> None:
    inserting = 'graph.insert(whatif.NewTasks([0], "new", whatif.TaskKind.CPU_OP, 1))'
    transform = load_transform(script(tmp_path, f"import whatif\ndef transform(graph): return {inserting}"))
    with pytest.raises(WhatifError, match=r"got Inserted; return its \.graph\."):
        transform(graph())


@pytest.mark.parametrize("body", ["return graph", "return graph.scale(graph.duration_ns < 0, 0.5)"])
def test_a_script_that_changes_nothing_is_reported(body: str, recorded: TaskGraph, tmp_path: Path) -> None:
    """A dropped result, or nothing selected, looked like an optimization that does not help."""
    path = script(tmp_path, f"def transform(graph): {body}")
    found = apply(recorded, path)
    assert found.notes == (f"{Path(path).stem}: it changes nothing here",)


@pytest.mark.parametrize("failing", ["sys.exit(0)", "sys.exit()", "1 / 0"])
def test_a_script_that_fails_or_exits_is_named(failing: str, tmp_path: Path) -> None:
    transform = load_transform(script(tmp_path, f"import sys\ndef transform(graph): {failing}"))
    with pytest.raises(WhatifError, match=r"transform 'mine' .* failed: "):
        transform(graph())


def test_a_script_cannot_write_into_the_graph_that_others_begin_with(tmp_path: Path) -> None:
    before = graph()
    writes = load_transform(script(tmp_path, "def transform(graph):\n    graph.duration_ns[:] = 0\n    return graph"))
    durations_ns = before.duration_ns.tolist()
    with pytest.raises(
        WhatifError, match=r"transform 'mine' .* failed: ValueError: assignment destination is read-only"
    ):
        writes(before)
    assert before.duration_ns.tolist() == durations_ns


def test_an_option_may_have_further_types_for_python(tmp_path: Path) -> None:
    body = "def transform(graph, *, rate: float | list[float] = 1, path: str | None = None): return graph"
    assert load_transform(script(tmp_path, body) + ":rate=2").options == {"rate": 2.0}


def test_a_path_is_named_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WhatifError, match=r"^\./noext: expected the path of a transform script, got no such file"):
        load_transform("./noext")
    (tmp_path / "noext").write_text(HEADER)
    with pytest.raises(WhatifError, match=r"^\./noext: expected a transform script, whose name ends in \.py"):
        load_transform("./noext")


def test_transforms_load_where_docstrings_are_left_out(tmp_path: Path) -> None:
    code = (
        "import sys; from whatif.prediction.transform import load_transform;"
        "print(*(load_transform(n).doc for n in sys.argv[1:]))"
    )
    words = ["amp", script(tmp_path, "def transform(graph): return graph")]
    found = subprocess.run([sys.executable, "-OO", "-c", code, *words], capture_output=True, text=True, check=True)
    assert found.stdout == f"{load_transform('amp').doc} {load_transform(words[1]).doc}\n"
    bare = script(tmp_path, "def transform(graph): return graph", "bare.py", header="")
    found = subprocess.run([sys.executable, "-OO", "-c", code, bare], capture_output=True, text=True, check=False)
    assert "expected a docstring whose first line" in found.stderr


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(b"\x00\xff\xfe")
    with pytest.raises(WhatifError, match="could not be run"):
        load_transform(path)


# -- applied -------------------------------------------------------------------------------------------------------

LAST = "def transform(graph): return graph\ndef schedule(frontier): return max(frontier.ready_ns)"


def test_two_scripts_that_override_the_schedule_are_named(tmp_path: Path, recorded: TaskGraph) -> None:
    one, two = script(tmp_path, LAST, "one.py"), script(tmp_path, LAST, "two.py")
    with pytest.raises(WhatifError, match="'one' and 'two' both override the schedule"):
        apply(recorded, one, "scale:factor=0.5", two)
    assert apply(recorded, one, "scale:factor=0.5").transforms[0].schedule is not None


def test_transforms_are_applied_left_to_right(tmp_path: Path, recorded: TaskGraph) -> None:
    """First twice as long, then 3 us off every kernel: 2 · 10 - 3, not 2 · (10 - 3)."""
    body = "def transform(graph): return graph.with_duration(graph.on_gpu, graph.duration_ns[graph.on_gpu] - 3000)"
    less = script(tmp_path, body, "less.py")
    twice = "scale:kind=gpu,factor=2"
    ends = [apply(recorded, *order).timeline.makespan_ns for order in ((twice, less), (less, twice))]
    assert ends == [5_000 + 17_000, 5_000 + 14_000]


def test_a_graph_that_a_script_broke_is_refused(tmp_path: Path, recorded: TaskGraph) -> None:
    body = "def transform(graph): return graph.replace(duration_ns=graph.duration_ns - 10**6)"
    with pytest.raises(WhatifError, match="negative duration"):
        apply(recorded, script(tmp_path, body))


def test_functions_names_and_transforms_may_be_mixed(recorded: TaskGraph) -> None:
    def half(graph: TaskGraph) -> TaskGraph:
        """Halve the kernels."""
        return graph.scale(graph.on_gpu, 0.5)

    prediction = apply(recorded, half, "scale:kind=gpu,factor=0.5", load_transform("scale", kind="gpu", factor=2.0))
    assert [t.name for t in prediction.transforms] == ["half", "scale", "scale"]
    assert prediction.predicted_ms == pytest.approx(0.005)
    assert prediction.speedup == pytest.approx(2.0)


@pytest.mark.parametrize("what", [3, None, b"scale"])
def test_what_is_no_transform_is_refused(what: Any, recorded: TaskGraph) -> None:
    with pytest.raises(WhatifError, match="expected a transform's name"):
        apply(recorded, what)


def test_ranks_and_the_path_of_a_script_are_taken(own_traces: Path, tmp_path: Path) -> None:
    path = script(tmp_path, "def transform(graph): return graph.scale(graph.on_cpu, 0.5)", "idea.py")
    ranks = read_ranks([own_traces / "ranks_cpu" / "even"])
    prediction = apply(ranks, Path(path))
    assert prediction.predicted_ms == apply(ranks.graph, path).predicted_ms < prediction.baseline_ms


@pytest.mark.parametrize("what", [b"trace.json", ["a.json", "b.json"], 3])
def test_what_is_no_recording_is_refused(what: Any) -> None:
    with pytest.raises(WhatifError, match=r"expected the path of a trace, got .*read_ranks"):
        apply(what, "amp")


@pytest.mark.parametrize("transforms", [(), ("scale:factor=1",)])
def test_the_identity_predicts_the_baseline(transforms: tuple[str, ...], recorded: TaskGraph) -> None:
    prediction = apply(recorded, *transforms)
    assert prediction.predicted_ms == prediction.baseline_ms
    # Two runs of one program differ, also where nothing changes.
    assert prediction.low_ms < prediction.predicted_ms < prediction.high_ms
    assert prediction.speedup == 1.0
    assert math.isfinite(prediction.baseline.replay_error_pct)


def test_a_schedule_reads_the_column_that_its_transform_attached(tmp_path: Path, recorded: TaskGraph) -> None:
    body = """
import numpy as np
def transform(graph): return graph.attach(priority=np.arange(len(graph)))
def schedule(frontier): return max(frontier.ready_ns, key=lambda task: frontier.graph.attached["priority"][task])
"""
    transform = load_transform(script(tmp_path, body))
    assert isinstance(transform, Transform)
    assert apply(recorded, transform).predicted_ms == apply(recorded).baseline_ms
    assert np.array_equal(transform(recorded).attached["priority"], np.arange(len(recorded)))
    assert Frontier.earliest.__doc__ is not None


BY_PRIORITY = (
    HEADER
    + """
def transform(graph): return graph
def priority(graph): return {}
"""
)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("[1.0] * len(graph)", ""),
        ("[1]", r"expected a number for each of the \d+ tasks, got int64 of shape \(1,\)"),
        ("['a'] * len(graph)", "expected a number for each"),
        ("[1.0]", r"got float64 of shape \(1,\)\.$"),
        ("[float('nan')] * len(graph)", r"got float64 of shape \(\d+,\), some of them NaN\.$"),
        ("1 // 0", r"priority\(\) of .*ZeroDivisionError.*a number for each task"),
    ],
)
def test_a_priority_is_a_number_for_each_task(tmp_path: Path, column: str, said: str) -> None:
    script = tmp_path / "mine.py"
    script.write_text(BY_PRIORITY.format(column), encoding="utf-8")
    schedule = load_transform(str(script)).schedule
    graph = step()
    if not said:
        assert simulate(graph, schedule).end_ns.tolist() == simulate(graph).end_ns.tolist()
        return
    with pytest.raises(WhatifError, match=said):
        simulate(graph, schedule)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_priority_without_a_thread_to_choose_for_says_so(tmp_path: Path, recorded: TaskGraph, ordered: bool) -> None:
    body = f"""
from dataclasses import replace
import numpy as np
def transform(graph): return graph.replace(threads=tuple(replace(t, ordered={ordered}) for t in graph.threads))
def priority(graph): return np.zeros(len(graph))
"""
    said = "mine: its priority changes nothing, because every thread runs in a fixed order"
    assert any(note.startswith(said) for note in apply(recorded, script(tmp_path, body)).notes) is ordered


@pytest.mark.parametrize("more", ["def schedule(frontier): return 0", "priority = 3", "def priority(): return 0"])
def test_a_script_has_a_schedule_or_a_priority_of_one_argument(tmp_path: Path, more: str) -> None:
    script = tmp_path / "mine.py"
    script.write_text(f"{BY_PRIORITY.format('[]')}{more}\n", encoding="utf-8")
    with pytest.raises(WhatifError, match=r"expected priority\(graph\) -> array and no schedule"):
        load_transform(str(script))
