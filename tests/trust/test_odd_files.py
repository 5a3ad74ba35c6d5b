"""Files that are no files, endless, deep, or compressed without end: an answer or a sentence, within bounded memory.

Commands run in processes of their own, with at most 6 GiB of address space.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import whatif

EVENT = '{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":%d,"dur":5,"args":{}}'
CONTROL = set("\x1b\x07\x08\u202e\u200b\x9b")
# Runs commands one after the other, and says last of all with which status each ended.
PROGRAM = """
import json, sys
from whatif.__main__ import main
found = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    found.append(main())
print()
print(json.dumps(found))
"""


def check(*words: str, cpu_s: int = 30, status: int | None = None) -> None:
    check_all(words, cpu_s=cpu_s, status=status)


def check_all(*commands: Sequence[str], cpu_s: int = 30, status: int | None = None) -> None:
    """Run commands in one process, within the limits of one."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, preexec_fn=limit,
    )  # fmt: skip
    said = (commands, done.returncode, done.stdout[-500:], done.stderr[-500:])
    assert done.returncode == 0, said
    allowed = (0, 1, 2) if status is None else (status,)
    assert [one in allowed for one in json.loads(done.stdout.splitlines()[-1])] == [True] * len(commands), said
    assert "Traceback" not in done.stderr, said
    assert "unexpected error" not in done.stderr, said
    assert not CONTROL & set(done.stdout + done.stderr), said


def trace(*events: str) -> str:
    return '{"traceEvents":[' + ",".join(events) + "]}"


def zipped(path: Path, head: bytes, block: bytes, times: int, tail: bytes) -> None:
    with gzip.open(path, "wb", 1) as file:
        file.write(head)
        for _ in range(times):
            file.write(block)
        file.write(tail)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_is_no_file_is_refused() -> None:
    os.mkdir("folder")
    os.symlink("loop2", "loop1.json")
    os.symlink("loop1.json", "loop2")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.json")
        odd = ("folder", "loop1.json", "socket.json", "/dev/null", "/dev/zero", "/dev/urandom")
        check_all(*(["info", path] for path in odd), status=1)


def test_odd_paths_are_refused() -> None:
    check_all(["info", ""], ["info", "no\x1b]0;x\x07.json"], ["apply", "a\x1b[2Jmp", "none.json"])


DEEP = {
    "list": '{"traceEvents":[' + "[" * 100_000 + "]" * 100_000 + "," + EVENT % 1 + "]}",
    "arguments": trace(
        (EVENT % 1).replace('"args":{}', '"args":' + '{"a":' * 100_000 + "1" + "}" * 100_000), EVENT % 9
    ),
    "header": '{"whatif":' + "[" * 100_000 + "]" * 100_000 + ',"traceEvents":[' + EVENT % 1 + "]}",
}


@pytest.mark.parametrize("where", DEEP)
def test_deep_nesting(where: str) -> None:
    Path("deep.json").write_text(DEEP[where])
    check("info", "deep.json", status=0)


def test_other_encodings() -> None:
    Path("utf16.json").write_bytes(trace(EVENT % 1).encode("utf-16"))
    check("info", "utf16.json", status=1)
    Path("bytes.json").write_bytes(trace(EVENT % 1, EVENT % 9).encode().replace(b"mm", b"\xff\xfe\x80", 1))
    check("info", "bytes.json", status=0)
    Path("twice.json.gz").write_bytes(gzip.compress(gzip.compress(trace(EVENT % 1).encode())))
    Path("name\u202e\x1b[31m.json").write_text(trace(EVENT % 1))
    check_all(["info", "twice.json.gz"], ["info", "name\u202e\x1b[31m.json"])


def nested(count: int) -> str:
    row = '{"ph":"X","cat":"cpu_op","name":"a%d","pid":1,"tid":1,"ts":%d,"dur":%d}'
    return trace(*(row % (i, i, 4 * count - 2 * i) for i in range(count)))


def crossing(count: int) -> str:
    row = '{"ph":"X","cat":"cpu_op","name":"a%d","pid":1,"tid":1,"ts":%d,"dur":%d}'
    return trace(*(row % (i % 7, i, count) for i in range(count)))


def threads(count: int) -> str:
    return trace(*((EVENT % i).replace('"tid":1', f'"tid":{i}') for i in range(count)))


def calling(count: int) -> str:
    """Threads that each run an operator, which launches a kernel."""
    operator = '{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":%d,"ts":%d,"dur":15}'
    call = '{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":1,"tid":%d,"ts":%d,"dur":5,"args":%s}'
    kernel = '{"ph":"X","cat":"kernel","name":"sgemm","pid":0,"tid":7,"ts":%d,"dur":10,"args":%s}'
    arguments = '{"correlation":%d,"stream":7,"device":0}'
    rows = (
        (operator % (i, 20 * i), call % (i, 20 * i + 5, arguments % i), kernel % (20 * i + 12, arguments % i))
        for i in range(1, count + 1)
    )
    return trace(*itertools.chain.from_iterable(rows))


def streams(count: int) -> str:
    row = '{"ph":"X","cat":"kernel","name":"a","pid":0,"tid":%d,"ts":%d,"dur":5,"args":{"stream":%d,"device":0}}'
    return trace(EVENT % 1, *(row % (i, i, i) for i in range(count)))


def reading_s(text: str) -> float:
    Path("many.json").write_text(text)
    begin_s = time.process_time()
    whatif.read("many.json")
    return time.process_time() - begin_s


@pytest.mark.parametrize("make", [threads, calling])
def test_reading_many_threads_takes_time_by_their_number(make: Callable[[int], str]) -> None:
    reading_s(make(100))
    # A machine's pace varies within seconds; a time that grows faster than their number does so in each turn.
    turns = ((reading_s(make(2_500)), reading_s(make(10_000))) for _ in range(3))
    assert any(many_s < 4 * 1.5 * few_s for few_s, many_s in turns)


@pytest.mark.slow
@pytest.mark.parametrize("make", [nested, crossing, threads, calling, streams])
def test_many_of_one_kind(make: Callable[[int], str]) -> None:
    count = {streams: 20_000, threads: 40_000, calling: 40_000}.get(make, 100_000)
    Path("many.json").write_text(make(count))
    # Some of them overlap or last as no operator does.
    check("info", "many.json", "--force", cpu_s=60 * count // 100_000 if make is not streams else 60, status=0)


@pytest.mark.slow
def test_what_grows_when_it_is_decompressed() -> None:
    event = (EVENT % 1).encode()
    zipped(Path("blanks.json.gz"), b'{"traceEvents": [', b" " * (1 << 20), 1000, event + b"]}")
    check("info", "blanks.json.gz", cpu_s=60)
    zipped(Path("text.json.gz"), b'{"a":"', b"x" * (1 << 20), 600, b'","traceEvents": [' + event + b"]}")
    check("info", "text.json.gz", cpu_s=60)
    with open("zeros.json", "wb") as file:
        file.truncate(3 << 30)
    check("info", "zeros.json", status=1)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/dev/zero", "tiny.json"])
def test_commands_on_an_endless_and_on_a_tiny_file(path: str) -> None:
    Path("tiny.json").write_text(trace(EVENT % 1, EVENT % 9))
    commands = [
        ["explain"], ["advise"], ["report", "-o", "r.html"], ["export", "-o", "e.json"], ["memory"], ["scaling"],
        ["anonymize", "-o", "a.json.gz"], ["sweep", "cpu", "--vary", "speedup=1,2"],
    ]  # fmt: skip
    check_all(*([*words, path] for words in commands))
