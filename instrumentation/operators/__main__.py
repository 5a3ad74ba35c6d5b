"""Measures a recording's operators alone, each also in the forms that a what-if asks about, and adds the times to it.

python -m whatif.instrumentation.operators RECORDING [--variants bf16,channels_last] [--budget-s 60]
"""

import argparse
from pathlib import Path

from whatif.runtime.errors import WhatifError

from .times import add_operator_times
from .variants import VARIANTS


def main() -> None:
    """Measure the operators of the recording that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m whatif.instrumentation.operators", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("recording", type=Path)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated, by default %(default)s")
    parser.add_argument(
        "--budget-s", type=float, help="approximate total time in seconds; by default that of 600 recorded steps"
    )
    options = parser.parse_args()
    try:
        add_operator_times(options.recording, options.variants.split(","), options.budget_s)
    except WhatifError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
