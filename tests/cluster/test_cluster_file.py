"""Cluster files: contents, levels derived from links, presets, and one-sentence errors."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whatif import WhatifError
from whatif.hardware.cluster.cluster_file import load_cluster, parse_cluster, preset_names
from whatif.hardware.cluster.links import Link
from whatif.hardware.cluster.network import Level
from whatif.hardware.cluster.topology import Processor
from whatif.hardware.gpu import load_gpu

PRESETS = Path(__file__).resolve().parents[2] / "whatif" / "hardware" / "cluster" / "presets"

LEVELS = """
[cluster]
name = "ours"
gpu = "V100-SXM2-16"

[[level]]
name = "node"
workers = 4
kind = "NVLink"
bandwidth = "10GB/s"
latency_us = 1.5

[[level]]
workers = 2
kind = "Ethernet"
bandwidth = "8Gbps"
latency_us = 10
shared = false
duplex = "half"
"""

# Two boxes of two, joined by one slow link: a1 = a2 ─── b1 = b2
BOXES = """
[[processor]]
name = "a"
count = 2
gflop_s = 100
power_fluctuation_pct = 5
memory_gbyte = 8

[[processor]]
name = "b"
count = 2

[[link]]
between = ["a", "a"]
bandwidth = "1GB/s"
latency_us = 1

[[link]]
between = ["b", "b"]
bandwidth = "1GB/s"
latency_us = 2

[[link]]
between = ["a2", "b1"]
bandwidth = "100MB/s"
latency_us = 50
bandwidth_fluctuation_pct = 10
"""


def test_levels_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(LEVELS)
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.gpu) == ("ours", "V100-SXM2-16")
    assert [level.kind for level in cluster.levels] == ["NVLink", "Ethernet"]
    assert cluster.network().levels == (
        Level(4, Link(10e9, 1_500), True), Level(2, Link(1e9, 10_000, False), False),
    )  # fmt: skip


@pytest.mark.parametrize(("workers", "counts"), [(1, (1, 1)), (2, (2, 1)), (4, (4, 1)), (8, (4, 2))])
def test_the_first_workers_fill_whole_nodes(workers: int, counts: tuple[int, ...]) -> None:
    network = parse_cluster(LEVELS, "ours.toml").network(workers)
    assert tuple(level.workers for level in network.levels) == counts


@pytest.mark.parametrize("workers", [6, 7, 12, 0, -4])
def test_workers_that_fill_no_equal_nodes_are_refused(workers: int) -> None:
    with pytest.raises(WhatifError, match=r"'ours': expected .* got -?\d+"):
        parse_cluster(LEVELS, "ours.toml").network(workers)


def test_the_last_level_may_have_any_number_of_members() -> None:
    cluster = parse_cluster(LEVELS.replace("workers = 2\n", ""), "ours.toml")
    assert cluster.network().workers == 4
    assert cluster.network(4_096).levels[1].workers == 1_024


def test_processors_and_links_are_read() -> None:
    cluster = parse_cluster(BOXES, "boxes.toml")
    assert [p.name for p in cluster.processors] == ["a1", "a2", "b1", "b2"]
    assert cluster.processors[1] == Processor("a2", 100, 5, 8)
    assert cluster.processors[2] == Processor("b1")
    assert [link.between for link in cluster.links] == [("a1", "a2"), ("b1", "b2"), ("a2", "b1")]
    assert cluster.links[2].link == Link(1e8, 50_000)
    assert cluster.links[2].bandwidth_fluctuation_pct == 10


def test_levels_follow_from_links() -> None:
    """Fast links make the boxes; the one between them is shared; the slowest latency of a rate counts."""
    network = parse_cluster(BOXES, "boxes.toml").network()
    assert network.levels == (Level(2, Link(1e9, 2_000), False), Level(2, Link(1e8, 50_000), True))


def test_a_link_for_each_processor_is_not_shared() -> None:
    text = BOXES.replace('["a2", "b1"]', '["a", "b"]')
    assert parse_cluster(text, "boxes.toml").network().levels[1] == Level(2, Link(1e8, 50_000), False)
    shared = text.replace("bandwidth_fluctuation_pct = 10", "shared = true")
    assert parse_cluster(shared, "boxes.toml").network().levels[1] == Level(2, Link(1e8, 50_000), True)


def test_groups_that_are_not_equal_have_no_levels() -> None:
    cluster = parse_cluster(BOXES.replace('name = "b"\ncount = 2', 'name = "b"\ncount = 3'), "boxes.toml")
    with pytest.raises(WhatifError, match=r"8 Gbit/s .* groups of 2, 3"):
        cluster.network()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 4), min_size=1, max_size=3), st.randoms())
def test_a_tree_of_equal_groups_gives_its_levels_back(parts: list[int], random) -> None:  # type: ignore[no-untyped-def]
    """Each group joins the next by one link of a tenth of the rate, whatever the order of the file."""
    count, below, links = 1, 1, []
    for part in parts:
        count *= part
    for level, part in enumerate(parts):
        for group in range(0, count, below * part):
            firsts = [group + member * below for member in range(part)]
            links += [(a, b, 10 ** (9 - level)) for a, b in itertools.pairwise(firsts)]
        below *= part
    random.shuffle(links)
    text = "".join(f'[[processor]]\nname = "p{number}"\n' for number in range(count))
    text += "".join(f'[[link]]\nbetween = ["p{a}", "p{b}"]\nbandwidth = "{rate}Bps"\n' for a, b, rate in links)
    network = parse_cluster(text, "tree.toml").network()
    assert [level.workers for level in network.levels] == parts
    assert [level.link.byte_s for level in network.levels] == [10 ** (9 - level) for level in range(len(parts))]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "node"', 'nam = "node"', r"level\[0\]\.nam: expected a known key.*did you mean 'name'"),
        ("workers = 4", "workers = 0", r"level\[0\]\.workers: expected a whole number from 1 .*got 0"),
        ("workers = 4", "workers = 2.5", r"level\[0\]\.workers: expected a whole number.*got 2\.5"),
        ("workers = 4", "workers = true", r"level\[0\]\.workers: expected a whole number.*got True"),
        ("workers = 4\n", "", r"level\[0\]\.workers: expected a number \(optional in the last level only\), got none"),
        ('"8Gbps"', '"-8Gbps"', r"level\[1\]\.bandwidth: expected a bandwidth above 0"),
        ('"8Gbps"', "8", r"level\[1\]\.bandwidth: expected a bandwidth above 0 with its unit.*got '8'"),
        ('bandwidth = "8Gbps"', "", r"level\[1\]\.bandwidth: expected text, got nothing"),
        ("latency_us = 10", "latency_us = -1", r"level\[1\]\.latency_us: expected a number from 0 .*got -1"),
        ("latency_us = 10", "latency_us = nan", r"level\[1\]\.latency_us: expected a number from 0 .*got nan"),
        ("shared = false", 'shared = "no"', r"level\[1\]\.shared: expected true or false, got 'no'"),
        ('"half"', '"simplex"', r"level\[1\]\.duplex: expected one of full, half, got 'simplex'"),
        ('"Ethernet"', '"string"', r"level\[1\]\.kind: expected one of NVLink.*got 'string'"),
        ("[cluster]", "[clutser]", r"clutser: expected a known key.*did you mean 'cluster'"),
        ("[[level]]", "[level]", "expected"),
        (LEVELS, "level = 3", r"level: expected tables \[\[level\]\], got 3"),
        (LEVELS, "cluster = 3", r"cluster: expected a table \[cluster\], got 3"),
        (LEVELS, "", r"expected a \[\[level\]\] or a \[\[processor\]\], got neither"),
        (LEVELS, "[[level", "expected a cluster file"),
    ],
)
def test_a_mistake_among_levels_is_one_sentence_with_its_place(old: str, new: str, said: str) -> None:
    text = LEVELS.replace(old, new)
    assert text != LEVELS
    with pytest.raises(WhatifError, match=said) as error:
        parse_cluster(text, "ours.toml")
    assert str(error.value).startswith("ours.toml: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('["a2", "b1"]', '["a2", "c"]', r"link\[2\]\.between: expected the name of a \[\[processor\]\], got 'c'"),
        ('["a2", "b1"]', '["a2"]', r"link\[2\]\.between: expected two processor names"),
        ('["a2", "b1"]', '["a2", "a2"]', r"link\[2\]\.between: expected two processors, got 'a2' twice"),
        (
            '["a2", "b1"]',
            '["a1", "a2"]',
            "expected links that connect all 4 processors, got none from .* to the others",
        ),
        ('name = "b"', 'name = "a"', r"processor\[1\]\.name: expected a name that is not in use"),
        ('name = "b"\ncount = 2', 'name = "a1"', "expected distinct names"),
        ("gflop_s = 100", "gflop_s = 0", r"processor\[0\]\.gflop_s: expected a number"),
        ("count = 2\ngflop_s", "count = 20000\ngflop_s", r"processor\[0\]\.count: expected a whole number"),
        ("pct = 10", "pct = 101", r"link\[2\]\.bandwidth_fluctuation_pct: expected a number from 0 to 100"),
    ],
)
def test_a_mistake_among_links_is_one_sentence_with_its_place(old: str, new: str, said: str) -> None:
    text = BOXES.replace(old, new, 1)
    assert text != BOXES
    with pytest.raises(WhatifError, match=said) as error:
        parse_cluster(text, "boxes.toml")
    assert str(error.value).startswith("boxes.toml: ")
    assert "\n" not in str(error.value)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([LEVELS, BOXES]), st.integers(0, 600), st.integers(0, 5), st.text(max_size=5))
def test_any_text_is_a_cluster_or_a_sentence(text: str, place: int, gone: int, put: str) -> None:
    said = "a cluster"
    try:
        parse_cluster(text[:place] + put + text[place + gone :], "any.toml").network(2)
    except WhatifError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("workers = " + "9" * 5000, "expected a cluster file"),
        ("[[level]]\nworkers = 8\nbandwidth = 25", "above 0 with its unit.* got '25'"),
        (
            '[[processor]]\nname = "a"\ncount = 10000\n[[link]]\nbetween = ["a", "a"]\nbandwidth = "1Gbps"',
            r"at most 100,000 links per \[\[link\]\], got 10,000 x 10,000",
        ),
    ],
    ids=["digits", "no unit", "links"],
)
def test_what_is_too_much_or_has_no_unit(text: str, part: str) -> None:
    with pytest.raises(WhatifError, match=part):
        parse_cluster(text, "any.toml")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match="one of dgx-a100"):
        load_cluster("dgx-a10")
    with pytest.raises(WhatifError, match="expected a cluster file, got No such file"):
        load_cluster(str(tmp_path / "none.toml"))
    for name in ("a" * 5000, "nul\0"):
        with pytest.raises(WhatifError, match="expected the path of a TOML file"):
            load_cluster(name)
    with pytest.raises(WhatifError, match="null"):
        load_cluster("nul\0.toml")
    (tmp_path / "endless.toml").symlink_to("/dev/zero")
    with pytest.raises(WhatifError, match="at most 5 MB"):
        load_cluster(str(tmp_path / "endless.toml"))
    (tmp_path / "windows.toml").write_bytes(b'\xef\xbb\xbf[[level]]\r\nworkers = 2\r\nbandwidth = "1Gbps"\r\n')
    assert load_cluster(str(tmp_path / "windows.toml")).network().workers == 2
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WhatifError, match="not UTF-8"):
        load_cluster(str(tmp_path / "binary.toml"))


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_names_itself_and_a_source_beside_each_number(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.gpu is None or load_gpu(cluster.gpu).name == cluster.gpu
    lines = (PRESETS / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    numbers = [line for line in lines if re.match(r"(bandwidth|latency_us)\s*=", line)]
    assert len(numbers) == 2 * len(cluster.levels)
    assert all(re.search(r"# \S.{10,}", line) for line in numbers)


def test_presets_cover_what_people_have() -> None:
    rates = {f"ethernet-{rate}g" for rate in (10, 25, 40, 100, 200, 400)}
    assert {"dgx-1", "dgx-a100", "dgx-h100", "pcie-4gpu", *rates} <= set(preset_names())
    assert load_cluster("ethernet-25g").network(8).levels[0].link.byte_s == 25e9 / 8
    assert load_cluster("dgx-a100").network(1_024).workers == 1_024
    b200 = load_cluster("dgx-b200")
    assert (b200.gpu, load_gpu("B200-SXM").cluster) == ("B200-SXM", "dgx-b200")
    # NVLink 5: 18 links of 40.1 GB/s (NCCL 2.30, topo.h, SM100_NVLINK_BW); then 400 Gbit/s a GPU.
    assert b200.levels[0].link.byte_s == pytest.approx(18 * 40.1e9, rel=1e-3)
    assert b200.levels[0].workers == 8
    assert b200.network(16).workers == 16
    node = load_cluster("dgx-h100").levels[0]
    # No ring is faster than the links' data sheet.
    assert node.link.byte_s / 1e9 <= (load_gpu("H100-SXM-80").nvlink_gbyte_s or 0)
    assert tomllib.loads((PRESETS / "dgx-1.toml").read_text())["level"][1]["shared"] is True


def test_each_preset_gets_faster_with_its_rate() -> None:
    for family in ("ethernet", "infiniband"):
        rates = sorted(int(n.split("-")[1][:-1]) for n in preset_names() if n.startswith(family))
        times = [load_cluster(f"{family}-{rate}g").network(8).cost("all_reduce", 1e8).total_ns[0] for rate in rates]
        assert times == sorted(times, reverse=True)
        assert len(rates) >= 3
