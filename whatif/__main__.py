"""Runs the command line: ``python -m whatif``."""

import sys

from whatif.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
