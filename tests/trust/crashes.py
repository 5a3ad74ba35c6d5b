"""Inputs on which commands end in an "unexpected error" instead of an answer or a refusal.

    python -m tests.trust.crashes

Seen today: none. tests/trust/test_input_faults.py keeps what was: a shortened trace of two AMD GPUs, of which a step's
forward pass runs on another thread (crash_step_rows.json.gz), and a path of 5,000 characters.
"""

from __future__ import annotations

from pathlib import Path

from tests.trust.common import call

TRACE = Path(__file__).with_name("crash_step_rows.json.gz")


def main() -> None:
    """Print what each command says."""
    for words in (["info"], ["explain"], ["apply", "scale:kind=gpu,factor=0.5"]):
        outcome = call(*words, TRACE)
        print(f"{' '.join(words)}: status {outcome.status} {outcome.err.strip()[:200]}")
    outcome = call("info", "x" * 5000)
    print(f"info with a long path: status {outcome.status} {outcome.err.strip()[:60]}")


if __name__ == "__main__":
    main()
