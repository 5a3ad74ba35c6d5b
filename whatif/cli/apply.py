"""``whatif apply``: predict the step time; several what-ifs compose."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whatif.cli.options import add_analysis, add_plot, check_plots
from whatif.cli.rank_files import add_ranks, names_then_traces, read_traces
from whatif.cli.reading import patience, show
from whatif.cli.trusted import baseline_of

if TYPE_CHECKING:
    from whatif.prediction.baseline import Baseline
    from whatif.prediction.transform import Transform
    from whatif.questions.sweep.values import Varied


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif apply``."""
    parser.usage = "whatif apply NAME[:option=value,...] [NAME ...] TRACE ... [OPTIONS]"
    parser.add_argument(
        "words",
        nargs="+",
        metavar="NAME ... TRACE",
        help="what-ifs (see `whatif transforms`, or the path of a .py file), then the trace, "
        "or the traces of several ranks of one run, or their folder",
    )
    add_plot(parser, "plot the parts of the step before and after")
    add_ranks(parser)
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print the prediction."""
    names, paths = names_then_traces(args.words)
    from whatif.prediction.predict import apply
    from whatif.prediction.transform import load_transform
    from whatif.questions.sweep.defaults import faster_links

    # Checks names before reading the trace, which may be large.
    transforms = [load_transform(name) for name in names]
    check_plots(args.plot, paths)
    graph, _ = read_traces(paths, args)
    baseline, question = baseline_of(args, graph), faster_links(graph, transforms)
    if question is not None:
        return _on_faster_links(args, baseline, *question)
    with patience("predicting"):
        prediction = apply(baseline, *transforms)
    from whatif.report.plot_breakdown import prediction_figure
    from whatif.report.text import print_prediction

    return show(
        args,
        prediction.to_dict,
        lambda: print_prediction(prediction),
        figure=lambda: prediction_figure(prediction),
        warnings=prediction.doubts,
        notes=prediction.notes,
    )


def _on_faster_links(
    args: argparse.Namespace,
    baseline: Baseline,
    transforms: Sequence[Transform],
    varied: Sequence[Varied],
    assumed: Sequence[str],
) -> int:
    """Print the gain by a faster network on several workers of a step that was recorded on one."""
    from whatif.questions.sweep.sweep import sweep
    from whatif.report.plot_sweep import sweep_figure
    from whatif.report.text_sweep import print_sweep

    with patience("predicting"):
        found = sweep(baseline, transforms, varied)
    return show(
        args,
        lambda: {**found.to_dict(), "assumed": list(assumed)},
        lambda: print_sweep(found),
        figure=lambda: sweep_figure(found),
        warnings=baseline.graph.info.remarks,
        notes=assumed,
    )
