"""`benchmarks.campaign.run` in blocks of a few steps: what is asked is what becomes of their times."""

from dataclasses import replace

from benchmarks.campaign import run, timing


def main() -> None:
    """Run a part of a job."""
    timing.EFFORT["cpu"] = replace(timing.EFFORT["cpu"], block_s=0.05)
    run.main()


if __name__ == "__main__":
    main()
