"""Make the steps of traces/predicted: predicted ones, because no GPU was available to record any.

python -m benchmarks.predicted_steps [NAME ...]

Each is the output of `whatif predict --save` for a network of the campaign, cut to its first steps. Needs torch.
"""

import os
import sys
import tempfile
from pathlib import Path

from torch import nn
from whatif.instrumentation.recording_file import read_recording, rewrite_recording
from whatif.instrumentation.whole_steps import keep_whole_steps

from benchmarks.campaign.models import FULL
from whatif.cli.main import main

FOLDER = Path(__file__).resolve().parent.parent / "traces" / "predicted"
# Name of the step: the network and the options of `whatif predict`.
STEPS = {
    "resnet50_a100_predicted": ("resnet50", "--input", "32,3,224,224", "--device", "A100-SXM-80"),
    "gpt2_h100_predicted": ("gpt2", "--input", "8,512:int64", "--device", "H100-SXM-80"),
}
OPTIMIZER = ("--optimizer", "adamw:for-loop")
# Readers skip the first and the last one; the median of two is enough if all are equal.
KEPT_STEPS = 4


def resnet50() -> nn.Module:
    """ResNet-50 for 1,000 classes, as the campaign trains it."""
    return FULL["resnet50"].build()


def gpt2() -> nn.Module:
    """GPT-2 small, as the campaign trains it."""
    return FULL["gpt2-small"].build()


def make(name: str, folder: Path) -> Path:
    """Predict a step and write it into the folder; return its file."""
    network, *options = STEPS[name]
    path = folder / f"{name}.json.gz"
    # The shipped models answer, not measurements from this machine.
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_DATA_HOME"] = empty
        os.environ.pop("WHATIF_OPDB", None)
        status = main(["predict", f"{__file__}:{network}", *options, *OPTIMIZER, "--save", str(path)])
    if status:
        raise SystemExit(status)
    recording, compressed = read_recording(path)
    recording["traceEvents"] = keep_whole_steps(recording["traceEvents"], 0, KEPT_STEPS)
    rewrite_recording(recording, path, compress=compressed)
    return path


if __name__ == "__main__":
    for each in sys.argv[1:] or STEPS:
        print(make(each, FOLDER))
