"""MetaFlow: policies by hand, as files and mappings, in a search, on random networks, and what is refused."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.helpers import CPU, STREAM, Build
from tests.transforms.layer_graphs import Call, network, times_us, work_order
from tests.transforms.test_rebatchnorm import layers
from whatif import (
    Phase,
    TaskGraph,
    WhatifError,
    load_transform,
    simulate,
)
from whatif.graph.memory import LayerMemory, Memory
from whatif.prediction.predict import Baseline
from whatif.simulation import simulator

ROOT = Path(__file__).resolve().parents[2]


def branches(**info: Any) -> TaskGraph:
    """Two convolutions of one input, a ReLU and a linear layer; times in us, launches of 1 us run ahead.

    ::

        forward   | conv_0 20 | conv_1 10 | relu_0 4 | linear_0 8 |
        backward  | linear_0 16 | relu_0 5 | conv_1 30 | conv_0 40 | update 5
    """
    return network(
        [
            Call("Conv2d_0", 20_000, 40_000), Call("Conv2d_1", 10_000, 30_000), Call("ReLU_0", 4_000, 5_000),
            Call("Linear_0", 8_000, 16_000),
        ],
        **info,
    )  # fmt: skip


def changed(graph: TaskGraph, **policy: Any) -> TaskGraph:
    return load_transform("metaflow", policy=policy)(graph).check()


def test_a_removed_layer_takes_its_kernels_and_launches() -> None:
    graph = changed(branches(), remove=["ReLU_0"])
    assert work_order(graph) == [
        "Conv2d_0", "Conv2d_1", "Linear_0", "Linear_0 backward", "Conv2d_1 backward", "Conv2d_0 backward", "update",
    ]  # fmt: skip
    assert graph.select(name="cudaLaunchKernel").sum() == 7
    assert (simulate(branches()).makespan_ns, simulate(graph).makespan_ns) == (139_000, 130_000)


def test_a_scaled_layer_takes_its_factor_forward_and_backward() -> None:
    graph = changed(branches(), scale=[{"layers": "Conv2d_.", "factor": 1.5}, {"layers": ["Linear_0"], "factor": 0.5}])
    assert times_us(graph, "Conv2d") == [30, 15, 45, 60]
    assert times_us(graph, "Linear") == [4, 8]
    assert simulate(graph).makespan_ns == 139_000 + 50_000 - 12_000


def test_merged_layers_become_the_first_one() -> None:
    """30 us forward and 70 backward together, of which four fifths are left; two launches less."""
    graph = changed(branches(), merge=[{"layers": ["Conv2d_1", "Conv2d_0"], "factor": 0.8}])
    assert work_order(graph) == [
        "Conv2d_1", "clamp_min", "Linear_0", "Linear_0 backward", "threshold_backward", "Conv2d_1 backward", "update",
    ]  # fmt: skip
    assert times_us(graph, "Conv2d_1") == [24, 56]
    assert graph.select(name="cudaLaunchKernel").sum() == 7
    assert simulate(graph).makespan_ns == 139_000 - 6_000 - 14_000
    same = changed(branches(), merge=[{"layers": "Conv2d_."}])
    assert times_us(same, "Conv2d_0") == [30, 70]
    assert simulate(same).makespan_ns == 139_000


def test_what_lies_inside_a_layer_goes_with_it(own_traces: Path) -> None:
    graph = whatif.read(own_traces / "campaign_cpu" / "resnet50--baseline.trace.json.gz")
    without = changed(graph, remove=["stages.0.0"])
    passes = without.select(phase=Phase.FORWARD) | without.select(phase=Phase.BACKWARD)
    assert not (passes & without.on_cpu & without.select(layer=r"^stages\.0\.0(\.|$)")).any()
    others = ~graph.select(layer=r"^stages\.0\.0(\.|$)") & graph.select(phase=Phase.FORWARD)
    kept = ~without.select(layer=r"^stages\.0\.0(\.|$)") & without.select(phase=Phase.FORWARD)
    assert kept.sum() == others.sum()


def test_a_removed_layer_leaves_the_update_if_gradients_are_known(own_traces: Path) -> None:
    path = own_traces / "campaign_cpu" / "vgg19--baseline.trace.json.gz"
    graph = whatif.read(path)
    rows = {layer.name: layer.gradient_bytes or 0 for layer in graph.info.recorded.layers}
    share = rows["classifier.3"] / sum(rows.values())
    assert share > 0.05
    without = changed(graph, remove=["classifier.3"])
    before, after = (
        g.duration_ns[g.select(phase=Phase.UPDATE) & (g.family >= 0) & g.in_optimizer].sum() for g in (graph, without)
    )
    assert 1 - share - 0.02 < after / before < 1


def test_memory_of_a_removed_layer_goes() -> None:
    rows = (LayerMemory("Conv2d_0", 700, 100), LayerMemory("ReLU_0", 300, 0), LayerMemory("Linear_0", 50, 300))
    graph = branches(memory=Memory(parameters=400, optimizer_state=800, inputs=10, layers=rows, update_workspace=40))
    memory = changed(graph, remove=["Linear_0", "ReLU_0"]).info.memory
    assert memory == Memory(parameters=100, optimizer_state=200, inputs=10, layers=rows[:1], update_workspace=10)


def test_collectives_and_waits_in_a_layer_stay() -> None:
    build = Build(CPU, STREAM)
    build.launch(1_000, 9_000, "k")
    build.sync(500)
    reduce = build.task(0, 1_000, "launch all-reduce", layer="fc", phase=Phase.BACKWARD)
    collective = build.task(1, 7_000, "all-reduce", whatif.TaskKind.COMMUNICATION, layer="fc", phase=Phase.BACKWARD)
    build.edge(reduce, collective, kind=0)
    graph = build.graph()
    table = {"layers": ("", "fc"), "layer": np.full(len(graph), 1, np.int32)}
    graph = graph.replace(**table, phase=np.full(len(graph), Phase.BACKWARD, np.int8))
    left = changed(graph, remove=["fc"])
    assert [left.names[code] for code in left.name.tolist()] == ["sync", "wait", "launch all-reduce", "all-reduce"]


# -- files, mappings, searches --------------------------------------------------------------------------------------

POLICY = {
    "remove": ["ReLU_0"],
    "scale": [{"layers": "Linear_0", "factor": 2}],
    "merge": [{"layers": ["Conv2d_0", "Conv2d_1"], "factor": 0.5}],
}
TOML = """
remove = "ReLU_0"
scale = [{layers = ["Linear_0"], factor = 2.0}]
[[merge]]
layers = 'Conv2d_\\d'
factor = 0.5
"""


def test_a_file_and_a_mapping_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text(json.dumps(POLICY))
    (tmp_path / "policy.toml").write_text(TOML)
    graphs = [load_transform("metaflow", policy=POLICY)(branches())]
    graphs += [load_transform(f"metaflow:policy={tmp_path}/policy.{form}")(branches()) for form in ("json", "toml")]
    assert [simulate(graph).makespan_ns for graph in graphs] == [1_000 + 15_000 + 35_000 + 48_000 + 5_000] * 3


def test_a_search_reads_once_and_simulates_three_times_a_policy(own_traces: Path, monkeypatch: Any) -> None:
    """One simulation and its two bounds; nothing else is simulated, and no file is opened."""
    baseline = Baseline.of(whatif.read(own_traces / "resnet18_cifar_cpu.json.gz"))
    count = {"simulate": 0}
    original = simulator.swept

    def counted(*arguments: Any) -> Any:
        count["simulate"] += 1
        return original(*arguments)

    monkeypatch.setattr(simulator, "swept", counted)
    monkeypatch.setattr("whatif.models.layers.policy._read", lambda path: pytest.fail(f"a mapping is no file: {path}"))
    convolutions = [layer for layer in baseline.graph.layers if ".conv" in layer]
    policies: list[Mapping[str, Any]] = [
        {"scale": [{"layers": [layer], "factor": factor}]} for layer in convolutions for factor in (0.5, 0.75, 1.0, 1.5)
    ]
    costs = {
        (row["scale"][0]["layers"][0], row["scale"][0]["factor"]): whatif.apply(
            baseline, load_transform("metaflow", policy=row)
        ).predicted_ms
        for row in policies[:24]
    }
    assert 0 < count["simulate"] <= 3 * 24
    for layer in {layer for layer, _ in costs}:
        found = [costs[layer, factor] for factor in (0.5, 0.75, 1.0, 1.5)]
        assert found == sorted(found)
        assert found[2] == pytest.approx(baseline.step_ns / 1e6)
    assert json.dumps(whatif.apply(baseline, load_transform("metaflow", policy=policies[0])).to_dict())


def test_the_page_shows_what_works(monkeypatch: Any, capsys: Any) -> None:
    text = (ROOT / "docs" / "metaflow.md").read_text()
    (policy,) = re.findall(r"```toml.*?\n(.*?)```", text, re.DOTALL)
    (program,) = re.findall(r"```python.*?\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(compile(program, "metaflow.md", "exec"), {})
    found = re.search(r"without \S+ and \S+: (\S+) instead of (\S+) ms", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) < float(found[2])
    graph = whatif.read(ROOT / "traces" / "campaign_cpu" / "resnet50--baseline.trace.json.gz")
    assert len(load_transform("metaflow", policy=tomllib.loads(policy))(graph).check()) < len(graph)


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({}, "got none"), ({"remove": []}, "got none"), ({"drop": ["ReLU_0"]}, "key 'drop'"),
        ({"remove": ["ReLU_9"]}, "did you mean 'ReLU_0'"), ({"remove": ["qqqq"]}, "does not have"),
        ({"remove": ["("]}, "regular expression"), ({"remove": [3]}, "names of layers"),
        ({"remove": [""]}, "names of layers"), ({"remove": {"a": 1}}, "names of layers"),
        ({"scale": {"layers": "ReLU_0"}}, "a list of"), ({"scale": "ReLU_0"}, "a list of"),
        ({"scale": [{"layers": "ReLU_0"}]}, "layers and factor"), ({"scale": ["ReLU_0"]}, "layers and factor"),
        ({"scale": [{"layers": "ReLU_0", "factor": 1, "by": 2}]}, "layers and factor"),
        *(
            ({"scale": [{"layers": "ReLU_0", "factor": factor}]}, "factor above 0")
            for factor in (0, -1, float("nan"), float("inf"), "2", True, None, 10**400)
        ),
        ({"merge": [{"layers": ["ReLU_0"]}]}, "2 layers or more"), ({"merge": [{"layers": "ReLU_0"}]}, "names one"),
        ({"merge": [{"layers": ["ReLU_0", "ReLU_0"]}]}, "merged twice"),
        ({"merge": [{"layers": ["ReLU_0", "Linear_0"]}, {"layers": ["Linear_0", "Conv2d_0"]}]}, "merged twice"),
        ({"remove": ["ReLU_0"], "scale": [{"layers": ".*", "factor": 2}]}, "removed and changed"),
        ({"remove": ["ReLU_0"], "merge": [{"layers": ["ReLU_0", "Linear_0"]}]}, "removed and changed"),
    ],
)  # fmt: skip
def test_a_policy_that_makes_no_sense_is_one_sentence(policy: dict[str, Any], words: str) -> None:
    with pytest.raises(WhatifError, match=re.escape(words)) as error:
        changed(branches(), **policy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.json", b"{", "expected JSON"), ("p.json", b"[1]", 'lists "remove"'), ("p.toml", b"=", "expected TOML"),
        ("p.json", b"\xff\xfe", "cannot be read"), ("p.json", b"[" * 100_000, "expected JSON"),
        ("p.yaml", b"remove: a", ".json or .toml"), ("p.json", b"", "expected JSON"), ("p.toml", b"", "got none"),
        ("p.json", b'{"remove": ["ReLU_0"], "scale": NaN}', "a list of"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_policy_is_one_sentence(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WhatifError, match=re.escape(words)) as error:
        load_transform(f"metaflow:policy={tmp_path / name}")(branches())
    assert "\n" not in str(error.value)


def test_a_policy_is_needed_and_a_recording_with_layers() -> None:
    with pytest.raises(WhatifError, match="policy=FILE"):
        load_transform("metaflow")(branches())
    with pytest.raises(WhatifError, match="names its layers"):
        changed(network([Call("Conv2d_0", 9_000)], named=False), remove=["Conv2d_0"])
    with pytest.raises(WhatifError, match="cannot be read"):
        load_transform("metaflow:policy=/nowhere/p.json")(branches())


@settings(max_examples=60, deadline=None)
@given(layers, st.data(), st.booleans(), st.integers(0, 20_000))
def test_on_any_network_a_policy_changes_its_layers_alone(
    calls: list[Call], data: st.DataObject, on_cpu: bool, launch_ns: int
) -> None:
    graph = network(calls, on_cpu=on_cpu, steps=2, launch_ns=launch_ns)
    named = list(graph.layers[1:])
    if not named:
        return
    one = data.draw(st.sampled_from(named))
    same = changed(graph, scale=[{"layers": [one], "factor": 1}])
    assert simulate(same).makespan_ns == simulate(graph).makespan_ns
    larger = changed(graph, scale=[{"layers": [one], "factor": 3}])
    assert simulate(larger).makespan_ns >= simulate(graph).makespan_ns
    without = changed(graph, remove=[one])
    assert simulate(without).makespan_ns <= simulate(graph).makespan_ns
    others = graph.layer != graph.layers.index(one)
    left = without.layer != without.layers.index(one)
    assert without.duration_ns[left].tolist() == graph.duration_ns[others].tolist()
    if len(named) > 1:
        other = data.draw(st.sampled_from([layer for layer in named if layer != one]))
        merged = changed(graph, merge=[{"layers": [one, other]}])
        work, after = ((g.on_cpu if on_cpu else g.on_gpu) for g in (graph, merged))
        assert merged.duration_ns[after].sum() == pytest.approx(graph.duration_ns[work].sum(), abs=4 * len(graph))
