"""What-ifs of layers on recordings of all kinds: a sound graph, or one sentence why not."""

from __future__ import annotations

from pathlib import Path

import pytest

import whatif
from whatif import TaskGraph, WhatifError, load_transform

OWN = (
    "resnet18_cifar_cpu",
    "transformer_cpu",
    "campaign_cpu/vgg19--baseline.trace",
    "campaign_cpu/bert-base--baseline.trace",
)
SHARED = (
    "tracelens-h100-mi300/mi300.resnet_act_checkpoint_ddp_train.json.gz", "triosim-vgg13-h100/vgg13_bs512_adam.json.gz",
    "hta/alexnet_fwd_a100.json.gz", "hta/mi250_minitoy_train.json.gz",
    "harryjmoss-a100-batch/bs64.run0.pt.trace.json.gz",
    "kineto-resnet50-v100/num_workers_0.2020-12.pt.trace.json.gz", "edls-a4000/torch_profiler_trace.json.gz",
    "tracelens-h100-mi300/h100.gaunernst_bert-small-uncased__1016001.json.gz",
)  # fmt: skip
SPECS = ("rebatchnorm", "rebatchnorm:activations=all", "gist", "gist:lossy=fp10", "vdnn", "vdnn:layers=all,mb=1")


def sound(graph: TaskGraph, spec: str) -> None:
    try:
        changed = load_transform(spec)(graph).check()
    except WhatifError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert refused.startswith(f"{spec.split(':')[0]}: expected")
        assert "\n" not in refused
        return
    if changed.notes != graph.notes and "nothing changes" in changed.notes[-1]:
        assert len(changed) == len(graph)
    name = spec.split(":")[0]
    again = load_transform(spec)(changed)
    assert len(again) == len(changed), "twice is once"
    assert changed.notes[-1].startswith(f"{name}: ")


@pytest.mark.parametrize("trace", OWN)
def test_own(own_traces: Path, trace: str) -> None:
    graph = whatif.read(own_traces / f"{trace}.json.gz")
    for spec in SPECS:
        sound(graph, spec)


@pytest.mark.parametrize("trace", SHARED)
def test_shared(shared_traces: Path, trace: str) -> None:
    graph = whatif.read(shared_traces / trace)
    for spec in SPECS:
        sound(graph, spec)


@pytest.mark.parametrize("first", ["amp", "batch_size:factor=2", "channels_last", "gist", "rebatchnorm"])
@pytest.mark.parametrize("second", ["rebatchnorm", "gist", "vdnn"])
def test_behind_another_what_if(shared_traces: Path, first: str, second: str) -> None:
    if first == second:
        return
    graph = whatif.read(shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz")
    both = whatif.apply(graph, first, second)
    one = whatif.apply(graph, first)
    assert both.low_ms <= both.predicted_ms <= both.high_ms
    if second == "rebatchnorm":  # there is no normalization
        assert both.predicted_ms == one.predicted_ms
    else:
        assert both.predicted_ms > one.predicted_ms
