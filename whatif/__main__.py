"""Runs the command line: ``python -m whatif``, and the script ``whatif``."""

import gc
import sys

# A command makes few reference cycles, and searching for them takes a tenth of a short command's time.
COLLECTIONS = 100_000, 20, 100


def main() -> int:
    """Run one command; return its exit status. Ctrl-C prints one sentence even while the command line itself loads."""
    if "collect" not in sys.argv:  # collect runs a user's script.
        gc.set_threshold(*COLLECTIONS)
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
