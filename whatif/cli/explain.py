"""``whatif explain``: where the step goes, what it waits for, the layers that matter; what a faster part gains."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from whatif.cli.options import add_analysis, add_top, check_plots
from whatif.cli.rank_files import add_ranks, add_traces, read_traces
from whatif.cli.reading import patience, show
from whatif.cli.status import UsageError
from whatif.cli.trusted import baseline_of

if TYPE_CHECKING:
    from whatif.graph.task_graph import TaskGraph
    from whatif.prediction.baseline import Baseline
    from whatif.questions.explain import Explanation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif explain``."""
    add_traces(parser)
    add_top(parser)
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="show the gain if a layer, operator family, phase or thread took 10, 50 or 100 %% less time",
    )
    parser.add_argument(
        "--by",
        choices=("line", "layer", "file", "stack", "step"),
        help="line, layer, file: time by source, from the call stacks of the trace, with the lines that wait for the "
        "GPU; stack: each frame within its callers; step: the time of each recorded step, and what the slow ones had "
        "more of",
    )
    parser.add_argument(
        "--efficiency",
        action="store_true",
        help="show MFU, and TFLOP/s, GB/s and shares of the GPU's peaks by kernel family, layer and phase",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="with --sensitivity, --efficiency (a roofline) or --by step: plot into a .png, .svg or .pdf file",
    )
    add_ranks(parser)
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print the explanation of a trace."""
    if sum(map(bool, (args.by, args.sensitivity, args.efficiency))) > 1:
        raise UsageError("explain: expected one of --sensitivity, --efficiency and --by, got several; name one.")
    if args.plot is not None:
        if not (args.sensitivity or args.efficiency or args.by == "step"):
            raise UsageError(
                "explain: expected --sensitivity, --efficiency or --by step with --plot; add what is to be drawn."
            )
        check_plots(args.plot, args.traces)
    graph, ranks = read_traces(args.traces, args)
    from whatif.questions.explain import explain
    from whatif.questions.stragglers import report

    baseline = baseline_of(args, graph)
    if args.by == "step":
        return _steps(graph, baseline, args)
    if args.efficiency:
        return _efficiency(baseline, args)
    if args.by == "stack":
        return _stacks(baseline, args)
    if args.by:
        return _lines(baseline, args)
    with patience("explaining"):
        explanation = explain(baseline, top=args.top)
    found = report(ranks, explanation.baseline) if ranks else None
    if args.sensitivity:
        return _sensitivity(explanation, args)

    def print_text() -> None:
        from whatif.report.text_explain import print_explanation

        print_explanation(explanation)
        if found is not None:
            from whatif.report.text_ranks import print_ranks

            print_ranks(found, top=args.top, has_gpu=graph.has_gpu)

    ranks_too = {"ranks": found.to_dict()} if found else {}
    return show(args, lambda: {**explanation.to_dict(), **ranks_too}, print_text, warnings=explanation.warnings)


def _steps(graph: TaskGraph, baseline: Baseline, args: argparse.Namespace) -> int:
    """Print how the recorded steps differ, and draw them if asked."""
    from whatif.prediction.doubts import warnings_of
    from whatif.questions.uneven_steps import uneven_steps
    from whatif.report.plot_steps import steps_figure
    from whatif.report.text_steps import print_steps

    found = uneven_steps(graph, baseline)
    return show(
        args,
        found.to_dict,
        lambda: print_steps(found),
        figure=lambda: steps_figure(found),
        warnings=warnings_of(baseline),
    )


def _lines(baseline: Baseline, args: argparse.Namespace) -> int:
    """Print where in the source the time of a step goes."""
    from whatif.prediction.doubts import warnings_of
    from whatif.questions.lines import line_parts
    from whatif.report.text_lines import print_lines

    found = line_parts(baseline, args.by, args.top)
    return show(args, found.to_dict, lambda: print_lines(found), warnings=warnings_of(baseline))


def _stacks(baseline: Baseline, args: argparse.Namespace) -> int:
    """Print what the step waits for by call stack."""
    from whatif.prediction.doubts import warnings_of
    from whatif.questions.flame import flame
    from whatif.report.text_lines import print_flame

    found = flame(baseline)
    return show(args, found.to_dict, lambda: print_flame(found), warnings=warnings_of(baseline))


def _efficiency(baseline: Baseline, args: argparse.Namespace) -> int:
    """Print the share of its GPU's peaks that the step reaches, and draw the roofline if asked."""
    from whatif.prediction.doubts import warnings_of
    from whatif.questions.efficiency import efficiency
    from whatif.report.plot_efficiency import roofline_figure
    from whatif.report.text_efficiency import print_efficiency

    found = efficiency(baseline, args.top)
    return show(
        args,
        found.to_dict,
        lambda: print_efficiency(found),
        figure=lambda: roofline_figure(found),
        warnings=warnings_of(baseline),
    )


def _sensitivity(explanation: Explanation, args: argparse.Namespace) -> int:
    """Print what the step gains if a part of it is faster, and draw it if asked."""
    from whatif.questions.sensitivity import sensitivity
    from whatif.report import text_sensitivity
    from whatif.report.plot_sensitivity import sensitivity_figure

    with patience("speeding up each part"):
        found = sensitivity(explanation.baseline, top=args.top)
    return show(
        args,
        lambda: text_sensitivity.as_dict(found, explanation),
        lambda: text_sensitivity.print_sensitivity(found, explanation),
        figure=lambda: sensitivity_figure(found),
        warnings=explanation.warnings,
    )
