"""Which what-ifs advice tries: built-in ones, plug-ins, and what their docstrings say of the effort."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.advice_by_hand import drawn, gains
from whatif.prediction.transform import built_in_names, load_transform
from whatif.questions.advice.advise import advise
from whatif.questions.advice.candidates import (
    OTHER_MACHINES,
    VARIANTS,
    installed,
)
from whatif.questions.advice.effort import Effort, EffortSize
from whatif.questions.advice.trial import Refusal


def test_every_built_in_is_tried_or_named_as_a_question() -> None:
    found = installed()
    assert not found.broken
    assert {t.name for t in found.transforms} | set(found.hypothetical) >= set(built_in_names())
    for name in found.hypothetical:
        assert Effort.of(load_transform(name).doc).size == EffortSize.NONE or name in OTHER_MACHINES
    assert {"scale", "kernels"} <= set(found.hypothetical)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_form_that_is_tried_can_be_loaded(name: str) -> None:
    assert [load_transform(spec).name for spec in VARIANTS[name]] == [name] * len(VARIANTS[name])


def test_a_plug_in_is_tried_and_a_broken_one_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Point:
        def __init__(self, name: str, module: Any) -> None:
            self.name, self.module = name, module

        def load(self) -> Any:
            if self.module is None:
                raise RuntimeError("no such library")
            return self.module

    mine = tmp_path / "mine.py"
    mine.write_text(
        '"""Mine: half of it."""\nfrom whatif import TaskGraph\n\n\n'
        "def transform(graph: TaskGraph) -> TaskGraph:\n    return graph.scale(graph.on_gpu, 0.5)\n"
    )
    import importlib.util

    spec = importlib.util.spec_from_file_location("mine", mine)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Point("mine", module), Point("broken", None)])
    found = advise(drawn())
    assert gains(found.gaining)["mine"] == 40.0
    entry = next(entry for entry in found.gaining if entry.trial.spelled == ("mine",))
    assert entry.to_dict(None)["effort"] == "unknown"  # its docstring does not say
    broken = [refused for refused in found.refused if refused.spelled == ("broken",)]
    assert [refused.why for refused in broken] == [Refusal.FAILED]
    assert "RuntimeError: no such library" in broken[0].reason


@pytest.mark.parametrize(
    ("doc", "size", "how"),
    [
        ("One.\n\nEffort: small: turn it on.", EffortSize.SMALL, "turn it on."),
        ("One.\n\nEffort: none: a question.\n", EffortSize.NONE, "a question."),
        ("One.\n\nEffort: large: other\n        machines.\n\nMore.", EffortSize.LARGE, "other machines."),
        ("One.\n\nEffort: huge: never.", EffortSize.UNKNOWN, ""),
        ("One. Effort: small: in the middle.", EffortSize.UNKNOWN, ""),
        ("", EffortSize.UNKNOWN, ""),
    ],
)
def test_effort_is_read_from_the_docstring(doc: str, size: EffortSize, how: str) -> None:
    assert Effort.of(doc) == Effort(size, how)
