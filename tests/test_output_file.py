"""Where a file is really written: through links, and never onto what is no file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from whatif.runtime.errors import WhatifError
from whatif.runtime.files import output_file, replacing


def test_a_link_stands_for_what_it_leads_to(tmp_path: Path) -> None:
    target = tmp_path / "real" / "out.json"
    target.parent.mkdir()
    (tmp_path / "link.json").symlink_to(target)
    (tmp_path / "second.json").symlink_to("link.json")
    assert output_file(tmp_path / "second.json") == Path(os.path.realpath(target))  # new
    target.write_text("old")
    assert output_file(tmp_path / "link.json") == Path(os.path.realpath(target))


# Only asked about: nothing here is written.
@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/null", "/dev/new.json", "/proc/self/fd/1", "/dev/../dev/fd/1"])
def test_devices_and_streams_are_refused(path: str) -> None:
    with pytest.raises(WhatifError, match="got something that is no file"):
        output_file(path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to pipe").symlink_to("pipe")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "to stream").symlink_to("/proc/self/fd/1")
    for name in ("pipe", "to pipe", "round", "to stream", "."):
        with pytest.raises(WhatifError, match="got something that is no file"):
            output_file(tmp_path / name)
    with pytest.raises(WhatifError, match="expected a folder to write into, got none"):
        output_file(tmp_path / "nowhere" / "out.json")


def test_what_a_killed_program_left_is_swept_and_a_running_ones_stays(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write = (
        "import sys, os, signal; from whatif.runtime.files import replacing\n"
        "with replacing(sys.argv[1]) as part:\n"
        "    part.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", write, str(path)], check=False)
    assert [file.suffix for file in tmp_path.iterdir()] == [".part"]
    with replacing(tmp_path / "slow.json") as slow:
        slow.write_text("still written")
        (tmp_path / ".mine.part").write_text("no file of ours")
        with replacing(path) as part:
            part.write_text("whole")
        assert {file.name for file in tmp_path.iterdir()} == {"out.json", slow.name, ".mine.part"}


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (done.append(str(os.path.isdir(descriptor))), fsync(descriptor))
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replaced"), replace(*paths)))
    with replacing(tmp_path / "out.json") as part:
        part.write_text("x")
    assert done == ["False", "replaced", "True"]
