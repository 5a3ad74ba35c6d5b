"""Runs the command line: ``python -m whatif``, and the script ``whatif``."""

import sys


def main() -> int:
    """Run one command; return its exit status. Ctrl-C is one sentence also while the command line itself loads."""
    try:
        from whatif.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        if "--debug" in sys.argv:
            raise
        sys.stderr.write("whatif: interrupted.\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
