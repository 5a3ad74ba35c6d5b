"""`collect` on scripts that know nothing of it: finds the step and the model, says what is wrong in one sentence."""

import gzip
import json
import os
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from tests.instrumentation import warm
from whatif.runtime.errors import WhatifError

torch = need("torch")

pytestmark = pytest.mark.slow
collected = need("whatif.instrumentation.collect").collect

QUICK = {"steps": 3, "untraced_steps": 3}
# The optimizer's first step and two more to find the model, five of warm-up, three untraced, six with the profiler.
ALL_STEPS = 1 + 2 + 5 + 3 + 3 + 3

IMPORTS = "import sys, torch\nfrom torch import nn\n"
LOOP = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.encoder(x).relu())

model = Net()
teacher = nn.Linear(4, 2)  # Called, but not trained.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
loader = torch.utils.data.DataLoader(torch.randn(600, 4), batch_size=6)
loss_of = nn.MSELoss()
for number, batch in enumerate(loader, start=1):
    optimizer.zero_grad()
    loss_of(model(batch), teacher(batch).detach()).backward()
    optimizer.step()
    scheduler.step()
"""


@pytest.fixture(scope="module", autouse=True)
def rates_are_measured_once() -> Iterator[None]:
    """Each recording here would find those of the same machine."""
    recorder = need("whatif.instrumentation.recorder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "measure_rates", cache(recorder.measure_rates))
        yield


@pytest.fixture(autouse=True)
def this_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script finds `sys` as at Python's own start, and keeps it for what outlives the script."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def collect(path: str, args: list[str], output: Path, **options: Any) -> Path:
    """Return the recording of a script that was stopped behind it; raises WhatifError where there is none."""
    ended = collected(path, args, output, **{"stop": True, **options})
    if ended.recording is None:
        raise WhatifError(ended.failure)
    assert ended.failure is None
    return ended.recording


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(IMPORTS + text)
    return str(path)


def steps_of(recording: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in recording["traceEvents"] if event["name"].startswith("ProfilerStep#")]


def layers_of(recording: dict[str, Any]) -> list[str]:
    return [layer["name"] for layer in recording["whatif"]["layers"]]


def record(folder: Path, text: str, args: list[str] | None = None) -> dict[str, Any]:
    path = collect(script(folder, text), args or [], folder / "run.json", **QUICK)
    assert path == folder / "run.json"
    return json.loads(path.read_text())


def test_records_an_unchanged_script(tmp_path: Path) -> None:
    recording = record(tmp_path, LOOP)
    assert layers_of(recording) == ["(root)", "encoder", "head"]
    assert recording["whatif"]["batch_size"] == 6
    assert recording["whatif"]["optimizer"]["type"] == "SGD"
    assert recording["whatif"]["untraced_step_ms"]["steps"] == 3
    assert not torch.nn.modules.module._has_any_global_hook()


def test_every_step_holds_its_data_loading_and_its_whole_update(tmp_path: Path) -> None:
    recording = record(tmp_path, LOOP)
    steps = steps_of(recording)
    assert len(steps) == 3
    for prefix in ("enumerate(DataLoader)#", "Optimizer.zero_grad#", "Optimizer.step#SGD", "whatif::layer::encoder"):
        events = [event for event in recording["traceEvents"] if event["name"].startswith(prefix)]
        inside = [
            sum(
                step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] for event in events
            )
            for step in steps
        ]
        assert inside == [1, 1, 1], prefix


def test_runs_the_script_as_python_would_and_stops_it_when_done(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("WIDTH = 4\n")
    text = f"""
import helper
assert __name__ == "__main__" and helper.WIDTH == 4
print("arguments", sys.argv[1:], flush=True)
try:
{textwrap.indent(LOOP, "    ")}
    print("trained to the end")
finally:
    print("cleaned up after", number)
"""
    (tmp_path / "collects.py").write_text(
        "import sys; from pathlib import Path; from whatif.instrumentation.collect import collect;"
        "print(collect(sys.argv[1], sys.argv[2:], Path('run.json.gz'), steps=3, untraced_steps=3, stop=True).recording)"
    )
    words = ["collects.py", script(tmp_path, text), "--lr", "0.1"]
    run = warm.python(words, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    expected = ["arguments ['--lr', '0.1']", f"cleaned up after {ALL_STEPS}", "run.json.gz"]
    assert run.stdout.splitlines() == expected
    assert sorted(path.name for path in tmp_path.glob("*run*")) == ["run.json.gz"]


def test_several_optimizers_make_one_step(tmp_path: Path) -> None:
    recording = record(
        tmp_path,
        """
class Generator(nn.Linear): pass
class Critic(nn.Linear): pass
generator, critic = Generator(3, 4), Critic(4, 1)
update_critic = torch.optim.Adam(critic.parameters())
update_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
for _ in range(100):
    for _ in range(3):
        critic(generator(torch.randn(5, 3)).detach()).mean().backward()
        update_critic.step()
    critic(generator(torch.randn(5, 3))).mean().backward()
    update_generator.step()
""",
    )
    assert layers_of(recording) == ["(root)", "Critic", "Generator"]
    assert recording["whatif"]["samples_per_step"] == recording["whatif"]["batch_size"] == 5
    optimizer = recording["whatif"]["optimizer"]
    assert (optimizer["type"], optimizer["parameter_tensors"], optimizer["parameters"]) == ("SGD", 4, 3 * 4 + 4 + 5)
    assert optimizer["state_bytes"] == 2 * (4 * 5 + 4)  # Adam's two moments and its count of each of the critic's two
    names = [event["name"] for event in recording["traceEvents"]]
    assert len(steps_of(recording)) == 3
    assert names.count("Optimizer.step#Adam.step") == 9
    assert names.count("Optimizer.step#SGD.step") == 3


NEW_OPTIMIZERS = """
model = nn.Linear(4, 2)
for kind, steps in ((torch.optim.SGD, {0}), (torch.optim.Adam, {1})):
    optimizer = kind(model.parameters())
    for _ in range(steps):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
"""


def test_a_new_optimizer_in_the_recorded_steps_begins_the_recording_again(tmp_path: Path) -> None:
    """Steps of two optimizers would be of different work."""
    said: list[str] = []
    text = NEW_OPTIMIZERS.format(ALL_STEPS - 2, ALL_STEPS + 5)
    path = collect(script(tmp_path, text), [], tmp_path / "run.json", say=said.append, **QUICK)
    recording = json.loads(path.read_text())
    names = [event["name"] for event in recording["traceEvents"]]
    assert (names.count("Optimizer.step#SGD.step"), names.count("Optimizer.step#Adam.step")) == (0, 3)
    assert recording["whatif"]["optimizer"]["type"] == "Adam"
    assert recording["whatif"]["optimizer"]["parameters"] == 4 * 2 + 2
    assert "the script has a new optimizer: the recording begins again." in said


def test_a_script_whose_optimizers_are_new_too_often_says_what_would_do(tmp_path: Path) -> None:
    path = script(tmp_path, NEW_OPTIMIZERS.format(ALL_STEPS - 2, ALL_STEPS - 1))
    sentence = f"expected {ALL_STEPS} steps with the script's newest optimizer, got {ALL_STEPS - 1}: run more steps"
    with pytest.raises(WhatifError, match=f"^{sentence}, or try `--steps 3 --untraced-steps 2`"):
        collect(path, [], tmp_path / "run.json", **QUICK)
    assert collect(path, [], tmp_path / "run.json", steps=3, untraced_steps=2)


def test_an_optimizer_of_bare_tensors_is_enough(tmp_path: Path) -> None:
    recording = record(
        tmp_path,
        """
weight = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(100):
    (weight * torch.ones(3)).sum().backward()
    optimizer.step()
""",
    )
    assert [layer["name"] for layer in recording["whatif"]["layers"]] == ["(root)"]
    assert recording["whatif"]["grad_ready_order"] == []
    assert recording["whatif"]["ddp"] is None
    assert len(steps_of(recording)) == 3


def test_a_script_without_an_optimizer_marks_its_steps(tmp_path: Path) -> None:
    recording = record(
        tmp_path,
        """
import whatif.instrumentation
model = nn.Sequential(nn.Linear(4, 2))
for _ in range(100):
    model(torch.randn(7, 4))
    whatif.instrumentation.step()
""",
    )
    assert len(steps_of(recording)) == 3
    assert layers_of(recording) == ["(root)", "0"]
    assert recording["whatif"]["optimizer"] is None
    assert recording["whatif"]["batch_size"] == 7
    need("whatif.instrumentation").step()  # Outside of collect: nothing happens.


def test_a_script_that_swallows_everything_is_stopped_at_the_next_step(tmp_path: Path) -> None:
    guarded = LOOP.replace(
        "    optimizer.step()", "    try:\n        optimizer.step()\n    except BaseException:\n        pass"
    )
    assert len(steps_of(record(tmp_path, guarded + "\nsys.exit(3)"))) == 3


EVERY_STEP = ("    optimizer.step()", "    try:\n        optimizer.step()\n    except BaseException:\n        pass")
THREAD = "import threading\ndef train():\n{}\nthread = threading.Thread(target=train)\nthread.start()\nthread.join()\n"


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        (LOOP, True),
        (THREAD.format(textwrap.indent(LOOP, "    ")), True),
        (f"try:\n{textwrap.indent(LOOP, '    ')}\nexcept BaseException:\n    sys.exit(1)\n", True),
        (LOOP.replace(*EVERY_STEP) + "\nsys.exit(3)", False),
        (LOOP.replace(*EVERY_STEP), False),
    ],
    ids=["stopped", "in a thread", "in its own way", "caught", "caught, to the last line"],
)
def test_only_a_script_that_ends_before_its_end_is_called_stopped(tmp_path: Path, text: str, cut: bool) -> None:
    ended = collected(script(tmp_path, text), [], tmp_path / "run.json", stop=True, **QUICK)
    assert (ended.stopped, ended.caught) == (cut, not cut)


def test_a_recording_that_fails_leaves_the_script_alone(tmp_path: Path) -> None:
    profiled = LOOP.replace(
        "    optimizer.step()", "    if number == 10:\n        profiler.start()\n    optimizer.step()"
    )
    text = f"profiler = torch.profiler.profile()\n{profiled}\nprofiler.stop()\nsys.exit(number)\n"
    ended = collected(script(tmp_path, text), [], tmp_path / "run.json", **QUICK)
    assert (ended.status, ended.recording) == (100, None)
    assert "expected 17 steps without the script's own profiler, got 0: switch it off" in ended.failure
    assert not (tmp_path / "run.json").exists()


def test_a_file_that_cannot_be_written_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(need("whatif.instrumentation.recording_file").os, "replace", full)
    said: list[str] = []
    ended = collected(script(tmp_path, LOOP), [], tmp_path / "run.json", say=said.append, **QUICK)
    why = "expected to write the file, got 'No space left on device'; free some space or name another."
    assert ended.failure == why
    assert said[-1] == f"{tmp_path / 'run.json'}: not written, the script keeps running: {why}"


def test_a_script_that_catches_every_stop_is_warned_about_once(tmp_path: Path) -> None:
    # Ctrl-C afterwards ends it, and is no failure.
    forever = LOOP.replace(
        "    optimizer.step()", "    try:\n        optimizer.step()\n    except SystemExit:\n        pass"
    )
    forever += "raise KeyboardInterrupt\n"
    said: list[str] = []
    ended = collected(script(tmp_path, forever), [], tmp_path / "run.json", stop=True, say=said.append, **QUICK)
    assert ended.interrupted
    assert ended.recording == tmp_path / "run.json"
    assert sum("the script catches SystemExit and keeps running; end it with" in one for one in said) == 1


def test_training_in_a_thread_ends_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[threading.ExceptHookArgs] = []
    hook = shown.append
    monkeypatch.setattr(threading, "excepthook", hook)
    body = textwrap.indent(LOOP, "    ")
    text = f"import threading\ndef train():\n{body}\nthread = threading.Thread(target=train)\nthread.start()\n"
    text += "thread.join()\n"
    assert len(steps_of(record(tmp_path, text))) == 3
    assert not shown
    assert threading.excepthook is hook


def test_only_a_recording_is_replaced(tmp_path: Path) -> None:
    path = script(tmp_path, LOOP)
    text = Path(path).read_text()
    with pytest.raises(WhatifError, match="expected another file than the script itself"):
        collect(path, [], Path(path), **QUICK)
    assert Path(path).read_text() == text
    notes = tmp_path / "notes.json.gz"
    for content in (b"mine", b"\x1f\x8bmine", gzip.compress(b"mine")):
        notes.write_bytes(content)
        with pytest.raises(WhatifError, match="expected a new file or an older recording to replace, got another file"):
            collect(path, [], notes, **QUICK)
        assert notes.read_bytes() == content
    notes.write_bytes(b"")
    for _ in ("an empty file", "a recording"):
        collect(path, [], notes, **QUICK)
        assert json.loads(gzip.decompress(notes.read_bytes()))["whatif"]["version"] == 1


def test_a_link_is_written_through_wherever_the_script_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run.json").symlink_to("elsewhere/target.json")
    path = script(tmp_path, "import os\nos.chdir('/')\n" + LOOP)
    monkeypatch.chdir(tmp_path)
    assert collect(path, [], Path("run.json"), **QUICK) == Path("run.json")
    assert (tmp_path / "run.json").is_symlink()
    assert len(steps_of(json.loads((tmp_path / "elsewhere" / "target.json").read_text()))) == 3
    assert [file.name for file in (tmp_path / "elsewhere").iterdir()] == ["target.json"]


def test_a_crash_is_the_scripts_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = LOOP + "    if number == 4:\n        raise ValueError('bad batch')\n"
    line = (IMPORTS + text).splitlines().index("        raise ValueError('bad batch')") + 1
    path = script(tmp_path, text)
    ended = collected(path, [], tmp_path / "run.json", **QUICK)
    assert (ended.status, ended.failure) == (1, "expected 17 steps, got ValueError (bad batch) after 4.")
    shown = capfd.readouterr().err.splitlines()
    first = shown.index("Traceback (most recent call last):")
    assert shown[first + 1] == f'  File "{path}", line {line}, in <module>'
    assert shown[-1] == "ValueError: bad batch"
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_crash_with_the_profiler_running_leaves_no_file_and_a_clean_process(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match="got ZeroDivisionError"):
        record(tmp_path, LOOP + f"    if number == {ALL_STEPS - 1}:\n        1 / 0\n")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert len(steps_of(record(tmp_path, LOOP))) == 3


@pytest.mark.parametrize(("code", "status"), [("3", 3), ("None", 0), ("'all wrong'", 1)])
def test_an_exit_is_the_scripts_own(tmp_path: Path, code: str, status: int, capfd: pytest.CaptureFixture[str]) -> None:
    ended = collected(script(tmp_path, f"sys.exit({code})"), [], tmp_path / "run.json", **QUICK)
    assert ended.status == status
    assert ("all wrong" in capfd.readouterr().err) == (status == 1)


@pytest.mark.parametrize("ended_by", ["break", "sys.exit(0)"])
def test_a_script_that_ends_before_three_recorded_steps_says_what_would_do(tmp_path: Path, ended_by: str) -> None:
    short = script(tmp_path, LOOP + f"    if number == {ALL_STEPS - 1}:\n        {ended_by}\n")
    with pytest.raises(WhatifError, match=rf"expected {ALL_STEPS} steps, got {ALL_STEPS - 1}: .*--untraced-steps 2`"):
        collect(short, [], tmp_path / "run.json", **QUICK)
    assert collect(short, [], tmp_path / "run.json", steps=3, untraced_steps=2)
    (tmp_path / "run.json").unlink()
    with pytest.raises(WhatifError, match=rf"expected {ALL_STEPS} steps, got 2: run more steps\."):
        record(tmp_path, LOOP + f"    if number == 2:\n        {ended_by}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_script_that_ends_early_keeps_three_recorded_steps(tmp_path: Path) -> None:
    path = script(tmp_path, LOOP + f"    if number == {ALL_STEPS}:\n        break\n")
    collect(path, [], tmp_path / "run.json", steps=50, untraced_steps=3)
    assert len(steps_of(json.loads((tmp_path / "run.json").read_text()))) == 3


def test_a_script_that_does_not_train_is_warned_about_step(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match=r"got none: add --inference .* or call whatif\.instrumentation\.step\(\)"):
        record(tmp_path, "print(nn.Linear(2, 2)(torch.ones(2)).shape)")


def test_a_script_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WhatifError, match="got no such file"):
        collect(str(tmp_path / "none.py"), [], tmp_path / "run.json", **QUICK)
