"""What `whatif export` writes, as Perfetto reads it: its own engine answers in SQL."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.browser.perfetto import Perfetto, opened
from tests.helpers import launched, write_trace
from whatif.cli.main import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("注意力::前向", "größe µs", 'a "quoted" \\ name', "</script>", "line\nend")


def export(folder: Path, *words: str) -> Path:
    out = folder / "step.json.gz"
    assert main(["export", *words, "-o", str(out), "--quiet"]) == 0
    return out


def shown(name: str) -> str:
    """A name as Perfetto shows it: a line end and its like as JSON writes them."""
    return re.sub("[\x00-\x1f]", lambda control: json.dumps(control[0])[1:-1], name)


def check(perfetto: Perfetto, path: Path) -> list[dict[str, Any]]:
    """All of the file is there exactly, and nothing was dropped, cut or put inside another; gives its events."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert perfetto.ask("select name, value from stats where value > 0 and severity != 'info'") == []
    written = Counter(
        (e["pid"], e["tid"], round(e["ts"] * 1000), round(e["dur"] * 1000), shown(e["name"]), e["cat"])
        for e in events
        if e["ph"] == "X"
    )
    slices = list(perfetto.slices())
    assert Counter(tuple(row[:6]) for row in slices) == written
    assert {row[6] for row in slices} == {0}  # none lies inside another
    arrows = sum(e["ph"] == "s" for e in events)
    assert perfetto.ask("select count(slice_out), count(slice_in), count(*) from flow") == [[arrows] * 3]
    values = sum(len(e["args"]) for e in events if e["ph"] == "C")
    assert perfetto.ask("select count(*) from counter") == [[values]]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert dict(perfetto.ask("select pid, name from process where pid > 0")) == named
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = perfetto.ask(
        "select pid, tid, t.name, is_main_thread from thread t join process using (upid) where t.name is not null"
    )
    assert {(pid, tid): name for pid, tid, name, _ in found} == rows
    # A main thread would be shown before the others, whichever it is.
    assert {main_thread for *_, main_thread in found} == {0}
    return events


def changes(perfetto: Perfetto) -> Counter[tuple[str, str]]:
    rows = perfetto.ask(
        "select process.name, extract_arg(slice.arg_set_id, 'args.change') as change, count(*) from slice "
        "join thread_track on track_id = thread_track.id join thread using (utid) join process using (upid) "
        "group by 1, 2"
    )
    return Counter({(name, change): count for name, change, count in rows})


def test_a_recording_with_transfers_added(browser: Any, own_traces: Path, tmp_path: Path) -> None:
    """Baseline and prediction as two groups, what is new marked, counters of memory and of the link."""
    path = export(tmp_path, str(own_traces / "transformer_cpu.json.gz"), "distributed:workers=2,bandwidth=1Gbps")
    with opened(browser, path) as perfetto:
        events = check(perfetto, path)
        counts = changes(perfetto)
        assert counts["predicted", "added"] > 0
        assert counts["baseline", "added"] == counts["predicted", "removed"] == 0
        assert counts == Counter(
            (("baseline", "predicted")[e["pid"] - 1], e["args"]["change"]) for e in events if e["ph"] == "X"
        )
        counters = {
            (side, name): value
            for side, name, value in perfetto.ask(
                "select process.name, t.name, max(value) from counter join process_counter_track t on t.id = track_id "
                "join process using (upid) group by 1, 2"
            )
        }
        for pid, side in ((1, "baseline"), (2, "predicted")):
            most = max(e["args"]["total"] for e in events if e["name"] == "memory (MiB)" and e["pid"] == pid)
            assert counters[side, "memory (MiB) total"] == pytest.approx(most)
        assert counters["predicted", "link: network Gbit/s of payload"] > 0
        assert ("baseline", "link: network Gbit/s of payload") not in counters
        arrows = (
            "select count(*) from flow join slice on slice.id = slice_in where category = 'simulated.communication'"
        )
        assert perfetto.ask(arrows)[0][0] > 0


def test_names_in_any_script(browser: Any, tmp_path: Path) -> None:
    events = [each for n, name in enumerate(NAMES) for each in launched(name, 1000 * n, 5, 1000 * n + 7, 100, n + 1)]
    path = export(tmp_path, str(write_trace(tmp_path / "run.json", events)), "scale:kind=gpu,factor=0.5")
    with opened(browser, path) as perfetto:
        check(perfetto, path)
        rows = perfetto.ask("select name, dur from slice where category = 'simulated.kernel' order by ts, dur desc")
        assert Counter(map(tuple, rows)) == Counter((shown(name), ns) for name in NAMES for ns in (100_000, 50_000))


@pytest.mark.parametrize(
    ("trace", "what_if"),
    [
        # Tasks of no time at all, which lie at the instant at which the next one begins.
        ("modded-nanogpt-8xh100/current.rank0.json.gz", "scale:kind=gpu,factor=0"),
        ("kineto-resnet50-v100/num_workers_0.2021-06.pt.trace.json.gz", "scale:factor=0.5"),
        ("param-dlrm-8xv100", "scale:factor=0.5"),
    ],
)
def test_recordings_of_others(browser: Any, shared_traces: Path, tmp_path: Path, trace: str, what_if: str) -> None:
    path = export(tmp_path, str(shared_traces / trace), what_if)
    with opened(browser, path) as perfetto:
        check(perfetto, path)
        joined = perfetto.ask("select count(*) from flow")[0][0]
        assert joined > 0


def test_the_queries_of_the_guide(browser: Any, own_traces: Path, tmp_path: Path) -> None:
    """Each can be pasted, and gives rows."""
    queries = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "export.md").read_text(encoding="utf-8"), re.DOTALL)
    assert queries
    path = export(tmp_path, str(own_traces / "transformer_cpu.json.gz"), "distributed:workers=2,bandwidth=1Gbps")
    with opened(browser, path) as perfetto:
        for query in queries:
            assert perfetto.ask(query)
