"""Operators measured alone: real recordings, real replays, and recordings that mean harm."""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from tests.instrumentation import warm
from whatif.runtime.errors import WhatifError

torch = need("torch")

pytestmark = pytest.mark.slow
nn = torch.nn
instrumentation = need("whatif.instrumentation")
op_times = need("whatif.instrumentation.operators.times")
op_recording = need("whatif.instrumentation.operators.recording")
metadata = need("whatif.instrumentation.metadata")
update_times = need("whatif.instrumentation.operators.update_times")

BATCH = 6  # No other length of the models below.


class Images(nn.Module):
    """Convolutions, batch normalization, an activation in place, dropout, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 5))

    def forward(self, images: Any) -> Any:
        return self.head(self.body(self.stem(images)).mean((2, 3)))


class Sentences(nn.Module):
    """An embedding, a recurrent layer, attention, and a choice among tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.recurrent = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, 50)

    def forward(self, ids: Any) -> Any:
        states, _ = self.recurrent(self.tokens(ids))
        heads = states.unflatten(-1, (4, 16)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.head(nn.functional.gelu(attended.transpose(1, 2).flatten(2))).flatten(0, 1)


@pytest.fixture(scope="module", autouse=True)
def _in_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What measures begins as a fork that has torch imported, which alone takes two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm.executable(tmp_path_factory.mktemp("warm")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """On a busy machine two threads wait for each other; and one thread is timed by its own clock."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def record(path: Path, model: nn.Module, inputs: Any, targets: Any, optimizer: Any) -> dict[str, Any]:
    with instrumentation.record(model, optimizer, path, steps=3, warmup_steps=1, untraced_steps=2) as recording:
        for _ in range(1 + 2 + 3 + 3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            recording.step()
    return read(path)


def read(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def write(path: Path, recording: dict[str, Any]) -> None:
    path.write_bytes(gzip.compress(json.dumps(recording).encode()))


def rows_of(recording: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    return [row for row in recording["whatif"]["operator_times"] if row["op"].removeprefix("aten::") in names]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], int, str]:
    """A recording before and after its operators were measured, how many were, and what was said."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("images") / "run.json.gz"
    model = Images()
    optimizer = torch.optim.Adam(model.parameters())
    before = record(path, model, torch.randn(BATCH, 3, 33, 33), torch.randint(0, 5, (BATCH,)), optimizer)
    count = op_times.add_operator_times(path)
    assert [file.name for file in path.parent.iterdir()] == ["run.json.gz"]
    return before, read(path), count, path.name


def test_only_the_times_are_added(images: Any) -> None:
    before, after, count, _ = images
    added = {"operator_times", "update_times_ns"}
    assert {key: value for key, value in after["whatif"].items() if key not in added} == before["whatif"]
    assert {key: value for key, value in after.items() if key != "whatif"} == {
        key: value for key, value in before.items() if key != "whatif"
    }
    assert len(after["whatif"]["operator_times"]) == count > 10


def test_a_row_holds_what_the_trace_holds(images: Any) -> None:
    _, after, _, _ = images
    recorded = {
        json.dumps(
            [event["name"], *(event["args"].get(key) for key in ("Input Dims", "Input type", "Concrete Inputs"))]
        )
        for event in after["traceEvents"]
        if event.get("cat") == "cpu_op"
    }
    for row in after["whatif"]["operator_times"]:
        assert json.dumps([row["op"], row["dims"], row["types"], row["concrete"]]) in recorded
        assert row["calls_per_step"] > 0
        assert row["ns"]["recorded"] > 0
        assert row["ns"].keys() == row["spread"].keys()


def test_measured_operators_make_nearly_all_the_time(images: Any) -> None:
    """Views and what computes nothing are left out; nothing of the update is among the operators."""
    _, after, _, _ = images
    operators = op_recording.distinct_operators(after)
    rows = after["whatif"]["operator_times"]
    keys = {json.dumps([row["op"], row["dims"], row["types"], row["concrete"]]) for row in rows}
    taken = sum(operator.recorded_ns for operator in operators if json.dumps(operator.call[:4]) in keys)
    assert taken > 0.9 * sum(operator.recorded_ns for operator in operators)
    assert not [op.call.name for op in operators if "adam" in op.call.name or "addcdiv" in op.call.name]
    assert not rows_of(after, "detach", "view", "t", "transpose")


def test_convolutions_have_every_form(images: Any) -> None:
    _, after, _, _ = images
    forms = {"recorded", "bf16", "channels_last", "bf16_channels_last", "batch_x0.5", "batch_x2"}
    convolutions = rows_of(after, "conv2d", "convolution_backward")
    assert len(convolutions) == 4
    assert all(row["ns"].keys() == forms for row in convolutions)


def test_twice_the_batch_takes_longer_than_half_of_it(images: Any) -> None:
    _, after, _, _ = images
    convolutions = rows_of(after, "conv2d", "convolution_backward")
    halves, doubles = (sum(row["ns"][name] for row in convolutions) for name in ("batch_x0.5", "batch_x2"))
    assert doubles > 2 * halves


def test_batch_normalization_has_an_eval_form_and_nothing_else_has(images: Any) -> None:
    _, after, _, _ = images
    with_eval = [row for row in after["whatif"]["operator_times"] if "eval" in row["ns"]]
    assert {row["op"] for row in with_eval} == {"aten::batch_norm", "aten::native_batch_norm_backward"}


def test_every_update_is_measured(images: Any) -> None:
    _, after, _, _ = images
    assert after["whatif"]["update_times_ns"].keys() == {"for_loop", "foreach", "fused"}
    assert min(after["whatif"]["update_times_ns"].values()) > 0


def test_rows_of_an_embedding_that_no_step_has_read_have_no_gradient(tmp_path: Path) -> None:
    """Three of four rows: their second moments are 0, of which a square root takes longer."""
    model = torch.nn.Sequential(torch.nn.Embedding(400, 8), torch.nn.Flatten(), torch.nn.Linear(800, 5))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    recording = record(
        tmp_path / "run.json.gz", model, torch.arange(100).repeat(4, 1), torch.tensor([0, 1, 2, 3]), optimizer
    )
    described = recording["whatif"]["optimizer"]
    assert described["zero_share"] == pytest.approx(300 * 8 / (400 * 8 + 800 * 5 + 5), abs=0.01)
    measured = update_times._optimizer(described, [(400, 8)], torch.device("cpu"), {})
    gradient = measured.param_groups[0]["params"][0].grad
    assert int(torch.count_nonzero(gradient)) == 3200 - round(described["zero_share"] * 3200)


def test_second_moments_of_another_kind_are_not_counted() -> None:
    """A factored optimizer keeps none, or no tensor, under that name: nothing of the recording is lost."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([parameter])
    for moment in (None, 1.0, [torch.zeros(4)], torch.zeros(4).to_sparse()):
        optimizer.state[parameter] = {"exp_avg_sq": moment}
        assert metadata.zero_share(optimizer) == 0
    optimizer.state[parameter] = {"exp_avg_sq": torch.tensor([0.0, 1.0, 1.0, 1.0])}
    assert metadata.zero_share(optimizer) == 0.25


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("sentences") / "run.json.gz"
    model = Sentences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 50, (BATCH, 11))
    record(path, model, ids, ids.flatten(), optimizer)
    op_times.add_operator_times(path, variants=["batch_x2"])
    return read(path)


def test_backward_passes_that_need_their_forward_pass_are_measured(sentences: dict[str, Any]) -> None:
    """A recurrent layer's backward operator needs a workspace that only its forward operator can fill."""
    (forward,) = rows_of(sentences, "lstm")
    (backward,) = rows_of(sentences, "mkldnn_rnn_layer_backward")
    attention = [row for row in sentences["whatif"]["operator_times"] if "attention" in row["op"]]
    assert len(attention) == 2
    for row in (forward, backward, *attention):
        assert row["ns"].keys() == {"recorded", "batch_x2"}


def test_the_batch_is_found_in_products_of_batch_and_tokens(sentences: dict[str, Any]) -> None:
    """The gradient of the head's weight sums over 66 tokens; that of its input has as many rows."""
    products = {json.dumps(row["dims"]): row["ns"] for row in rows_of(sentences, "mm")}
    assert set(products) == {json.dumps([[50, 66], [66, 64]]), json.dumps([[66, 50], [50, 64]])}
    assert all("batch_x2" in ns for ns in products.values())


def operator_event(name: str, dims: Any, types: Any, concrete: Any, ts: float) -> dict[str, Any]:
    args = {"Input Dims": dims, "Input type": types, "Concrete Inputs": concrete}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": 5.0, "args": args}


# Each would take the machine's memory, its time, its files, or the process, if it were done as it says.
HARMFUL = [
    ("aten::mm", [[1 << 20, 1 << 20], [1 << 20, 1 << 20]], ["float", "float"], ["", ""]),
    ("aten::add", [[1 << 20, 1], [1, 1 << 20], []], ["float", "float", "Scalar"], ["", "", "1"]),
    ("aten::relu", [[10**40]], ["float"], [""]),
    ("aten::relu", [[-4]], ["float"], [""]),
    ("aten::relu", [["__import__('os').system('true')"]], ["float"], [""]),
    ("aten::relu", [[4]], ["a type"], [""]),
    ("aten::relu", {"0": 1}, 7, None),
    ("aten::leaky_relu", [[4], []], ["float", "Scalar"], ["", "__import__('os')"]),
    ("aten::no_such_operator", [[4]], ["float"], [""]),
    ("aten::__class__", [[4]], ["float"], [""]),
    (
        "aten::from_file",
        [[], [], [], [], [], [], []],
        ["", "", "Scalar", "", "", "", ""],
        ["", "", "9", "", "", "", ""],
    ),
    # Writes outside its result: no process survives it.
    (
        "aten::_embedding_bag_dense_backward",
        [[2, 3], [1], [1], [1], [1], [], [], [], [], []],
        ["float", *["long int"] * 4, "Scalar", "Scalar", "Scalar", "", "Scalar"],
        ["", "", "", "", "", "0", "False", "0", "", "-1"],
    ),
]


def test_a_harmful_recording_costs_its_operators_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = need("whatif.instrumentation.metadata").describe_environment(False)
    path = tmp_path / "run.json.gz"
    calls = [*HARMFUL, ("aten::relu", [[64, 64]], ["float"], [""])]
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": 1e4}
    events = [step, *(operator_event(*call, ts=10.0 * number) for number, call in enumerate(calls, 1))]
    write(
        path,
        {
            "whatif": {
                **environment,
                "threads": 10**30,
                "batch_size": 10**400,
                "layers": [{"shapes": {"w": ["9"]}}, 3],
            },
            "traceEvents": events,
        },
    )
    assert op_times.add_operator_times(path) == 1
    (row,) = read(path)["whatif"]["operator_times"]
    assert (row["op"], row["dims"]) == ("aten::relu", [[64, 64]])
    assert read(path)["whatif"]["update_times_ns"] is None
    assert read(path)["traceEvents"] == events
    printed = capsys.readouterr().err
    assert "1 not measured" in printed
    assert "ended the measuring process" in printed
    assert "needs too much memory" in printed


def test_another_machine_is_refused(tmp_path: Path, own_traces: Path) -> None:
    path = tmp_path / "run.json.gz"
    recording = read(own_traces / "resnet18_cifar_cpu.json.gz")
    recording["whatif"]["cpu"] = "an abacus"
    write(path, recording)
    before = path.read_bytes()
    with pytest.raises(WhatifError, match=r"expected the machine of the recording \(an abacus\)"):
        op_times.add_operator_times(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.json.gz"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no trace", "expected a readable recording"),
        (b'{"traceEvents": []}', "expected a recording of whatif collect"),
        (b'{"whatif": {}, "traceEvents": []}', "expected a recording with ProfilerStep"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(WhatifError, match=message):
        op_times.add_operator_times(path)
    assert path.read_bytes() == content


def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match="expected variants among recorded, bf16"):
        op_times.add_operator_times(tmp_path / "run.json", variants=["fp8"])
