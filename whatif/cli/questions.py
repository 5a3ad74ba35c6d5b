"""The text of ``whatif`` without a command: five questions, and the commands that answer them."""

from __future__ import annotations

QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Why is my training slow?", ("whatif explain TRACE",)),
    (
        "Will an optimization help my model, and by how much?",
        ("whatif advise TRACE", "whatif apply amp TRACE"),
    ),
    ("Does GPU memory limit me, and will it fit?", ("whatif memory TRACE",)),
    (
        "Would a faster network, GPU or CPU help?",
        (
            "whatif recommend TRACE",
            "whatif apply cpu:speedup=2 TRACE",
            "whatif sweep distributed TRACE --vary bandwidth=10Gbps,25Gbps,100Gbps",
        ),
    ),
    (
        "How does it scale with more GPUs?",
        (
            "whatif apply distributed:workers=8,bandwidth=25Gbps TRACE",
            "whatif scaling TRACE --workers 1,2,4,8",
        ),
    ),
)


def page() -> str:
    """Return the questions as text of at most 80 columns."""
    lines = ["Predicts what a change would do to your DNN training, before you make it.", ""]
    for place, (question, commands) in enumerate(QUESTIONS, 1):
        lines += [f"  {place}. {question}", *(f"       {command}" for command in commands)]
    lines += [
        "",
        "TRACE is a file of torch.profiler, of `whatif collect train.py`, or of nsys.",
        "No trace yet: `whatif demo` writes one, with its report.",
        "All commands: whatif --help   All what-ifs: whatif transforms",
    ]
    return "\n".join(lines)
