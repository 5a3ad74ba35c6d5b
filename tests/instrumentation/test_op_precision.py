"""Operators are measured with the switches of the recorded run: they choose a GPU's kernels."""

from tests.helpers import need

torch = need("torch")
describe_precision = need("whatif.instrumentation.metadata").describe_precision
restore_precision = need("whatif.instrumentation.operators.worker")._restore_precision


def switches() -> dict[str, object]:
    return describe_precision(torch.nn.Linear(1, 1), None)


def test_the_recorded_switches_come_into_force() -> None:
    before = switches()
    # What switching TF32 off for convolutions leaves, where torch's default is "tf32".
    recorded = {"matmul": "tf32", "conv": "none", "rnn": "ieee", "cudnn_benchmark": True, "cudnn_deterministic": True}
    recorded = {key: value for key, value in recorded.items() if before[key] is not None}  # torch before 2.9
    try:
        restore_precision({**before, **recorded})
        assert switches() | recorded == switches()
    finally:
        restore_precision(before)
    assert switches() == before


def test_what_is_no_precision_changes_nothing() -> None:
    before = switches()
    for damaged in (None, [], {"matmul": 7, "conv": "__class__", "cudnn_benchmark": "yes"}):
        restore_precision(damaged)
    assert switches() == before
