"""``whatif advise``: every applicable what-if, ranked, with promising combinations."""

from __future__ import annotations

import argparse

from whatif.cli.options import add_analysis, add_plot, add_top, add_trace, check_plots
from whatif.cli.reading import progress_bar, read_trace, show
from whatif.cli.trusted import baseline_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``whatif advise``."""
    add_trace(parser)
    add_top(parser)
    add_plot(parser, "plot the gains with their ranges")
    add_analysis(parser)


def run(args: argparse.Namespace) -> int:
    """Print the advice for a trace."""
    check_plots(args.plot, [args.trace])
    graph = read_trace(args.trace, args)
    from whatif.prediction.predict import apply
    from whatif.questions.advice.advise import advise

    baseline = baseline_of(args, graph)
    with progress_bar("trying") as progress:
        advice = advise(baseline, top=args.top, progress=progress)
    warnings = apply(baseline).warnings
    from whatif.report.plot_advise import advice_figure
    from whatif.report.text_advise import print_advice

    return show(
        args,
        lambda: {**advice.to_dict(), "warnings": list(warnings)},
        lambda: print_advice(advice, args.top),
        figure=lambda: advice_figure(advice, args.top),
        warnings=warnings,
    )
