"""What the plots of sweeps and of scaling draw, as numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import whatif
from whatif import load_transform
from whatif.prediction.baseline import Baseline
from whatif.questions.sweep import parse_vary, sweep
from whatif.report.plot_sweep import sweep_figure

pytestmark = pytest.mark.slow


def test_a_line_goes_from_left_to_right(own_traces: Path) -> None:
    baseline = Baseline.of(whatif.read(own_traces / "lab_dts" / "dnn1.trace.json.gz"))
    transforms = [load_transform("distributed")]
    found = sweep(baseline, transforms, [parse_vary("bandwidth=10Gbps,100Mbps,100Gbps,1Gbps", transforms)])
    line = sweep_figure(found).axes[0].lines[0]
    by_rate = [found.points[place].step_ms for place in (1, 3, 0, 2)]
    assert list(line.get_xdata()) == [12.5e6, 125e6, 1.25e9, 12.5e9]
    assert list(line.get_ydata()) == by_rate
