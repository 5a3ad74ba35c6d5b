"""Files: checked paths of outputs, and limits on the contents of users' files.

Only regular files are written, at the target of a link; an existing file is replaced only if it is an older file of the
same kind. Users' files are read up to a size limit, and patterns in them are used only if they cannot take long. Files
on other machines are reached through fsspec.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from whatif.runtime.errors import WhatifError, expecting, in_short

# The version of whatif stored in files; pyproject.toml reads it from here.
VERSION = "0.2.0"
# Suffixes of recordings; other files in a folder are ignored.
RECORDING_SUFFIXES = (".json", ".json.gz", ".sqlite")
# The kernel's folders: a file renamed onto one of their entries would replace a device or a link.
NO_STORAGE = (Path("/dev"), Path("/proc"))
# Linux's limit on a chain of links.
MOST_LINKS = 40
# Enough to recognize every file that this program writes.
START_BYTES = 4096
GZIP_MAGIC = b"\x1f\x8b"
# Suffix of an unfinished file, after the writer's process id; ids are per machine, and the disk may be shared.
_PART = f".{os.uname().nodename.partition('.')[0][:20] if hasattr(os, 'uname') else 'here'}.part"


def output_file(path: str | Path) -> Path:
    """Return the regular file, new or old, at ``path``, with every symbolic link followed.

    A file is written beside its target and then renamed, which without this would replace a link instead of the file
    that it points to. Raises WhatifError if ``path`` leads to a folder, a device, a pipe or nowhere, or is empty.
    """
    if Path(path) == Path():
        raise WhatifError("expected the name of a file to write, got an empty name or this folder; name one.")
    target = _followed(Path(path))
    if target is None or (target.exists() and not target.is_file()):
        raise WhatifError(f"{path}: expected the name of a file to write, got something that is no file; name another.")
    if not target.parent.is_dir():
        raise WhatifError(f"{path}: expected a folder to write into, got none at {target.parent}; create it first.")
    if not os.access(target.parent, os.W_OK):
        raise WhatifError(
            f"{path}: expected a folder that can be written to, got a read-only one at {target.parent}; choose another."
        )
    return target


def file_beside(path: str | Path, trace: str | Path) -> Path:
    """Return ``output_file(path)``. Raises WhatifError as that does, and if it would overwrite the trace itself.

    A folder of several ranks means the traces in it.
    """
    target = output_file(path)
    files = [] if is_address(trace) else recordings_in(trace) if is_folder(trace) else [str(trace)]
    if target.exists() and any(os.path.isfile(file) and target.samefile(file) for file in files):
        raise WhatifError(f"{path}: expected another file than the trace itself, got the trace; name a new file.")
    return target


def replaceable_file(path: str | Path, kind: str, is_own: Callable[[bytes], bool]) -> Path:
    """Return ``output_file(path)`` if writing loses nothing: there is no file, an empty one, or one of this kind.

    ``is_own`` checks its first ``START_BYTES``, uncompressed. Raises WhatifError if another file would be lost.
    """
    target = output_file(path)
    if target.exists():
        start = _start(target)
        if start is None or not (start == b"" or is_own(start)):
            raise WhatifError(
                f"{path}: expected a new file or an older {kind} to replace, got another file: name another or remove "
                "it first."
            )
    return target


def _start(path: Path) -> bytes | None:
    """Return the first bytes of a file; None if it cannot be read, so that its kind is unknown."""
    import gzip  # not for `whatif --help`
    import zlib

    try:
        with path.open("rb") as file:
            start = file.read(START_BYTES)
        if start.startswith(GZIP_MAGIC):
            with gzip.open(path) as unpacked:
                start = unpacked.read(START_BYTES)
    except (OSError, EOFError, zlib.error):
        return None
    return start


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces ``path`` when the block succeeds and is removed if it fails.

    It is flushed to disk before it replaces the old file. Removes unfinished files of killed programs in the folder.
    Raises WhatifError as ``output_file`` does, and if the file cannot be written.
    """
    target = output_file(path)
    _sweep(target.parent)
    part = target.with_name(f".{target.name}.{os.getpid()}{_PART}")
    another = "; free some space or name another"
    try:
        with expecting(f"{path}: expected to write the file", OSError, hint=another):
            yield part
            _flush_to_disk(part)
            os.replace(part, target)
            _flush_to_disk(target.parent)
    finally:
        part.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove unfinished files whose writer, a process of this machine, has ended."""
    with suppress(OSError):
        for part in folder.glob(f".*{_PART}"):
            pid = part.name.removesuffix(_PART).rpartition(".")[2]
            if pid.isascii() and pid.isdecimal() and not _is_running(int(pid)):
                part.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    return True


def _flush_to_disk(path: Path) -> None:
    """Wait until the contents of a file, or renames in a folder, are on disk."""
    if path.is_dir() and os.name == "nt":  # a folder cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _followed(path: Path) -> Path | None:
    """Return the target of the links; None if they pass through a folder of the kernel, or never end.

    Follows link by link, because a link to a stream leads on to the file that the stream is redirected to.
    """
    for _ in range(MOST_LINKS):
        path = Path(os.path.realpath(path.parent)) / path.name
        if any(path.is_relative_to(folder) for folder in NO_STORAGE):
            return None
        if not path.is_symlink():
            return path
        path = path.parent / os.readlink(path)
    return None


# -- folders of the user -----------------------------------------------------------------------------------------------


def data_home() -> Path:
    """Return the folder for the user's data."""
    return _user_folder("XDG_DATA_HOME", ".local/share", "Application Support")


def cache_home() -> Path:
    """Return the folder for data that can be recomputed at any time."""
    return _user_folder("XDG_CACHE_HOME", ".cache", "Caches")


def _user_folder(variable: str, on_linux: str, on_macos: str) -> Path:
    """Return the user's folder by the system's conventions: XDG base directories, those of Windows or macOS."""
    folder = os.environ.get(variable, "")
    if os.path.isabs(folder):  # the XDG specification: a relative path is to be ignored
        base = Path(folder)
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / on_macos
    else:
        base = Path.home() / on_linux
    return base / "whatif"


# -- files on other machines -------------------------------------------------------------------------------------------

# Packages of fsspec's drivers, for the message when one is missing.
_DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "ssh": "paramiko", "sftp": "paramiko",
            "az": "adlfs", "abfs": "adlfs", "http": "aiohttp", "https": "aiohttp", "hdfs": "pyarrow",
            "smb": "smbprotocol"}  # fmt: skip
_LOOK = "check the address and its access rights."
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_address(path: str | Path) -> bool:
    """Whether ``path`` is an address for fsspec, such as ``s3://bucket/run``, not a path of this machine."""
    return bool(_ADDRESS.match(str(path)))


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of an address, and the path in it.

    Raises WhatifError if fsspec or its driver is missing, or if it does not know the address.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise WhatifError(
            f"{url}: expected the package fsspec, which reaches object stores and other machines, got none; install "
            "it with `pip install fsspec`."
        ) from error
    if not url.strip():
        raise WhatifError("expected an address such as s3://bucket/folder, got nothing.")
    if "::" in url:
        raise WhatifError(f"{url}: expected the address of a folder, got a chain of addresses (::); name one.")
    protocol = url.partition("://")[0] if "://" in url else "file"
    try:
        files, path = url_to_fs(url)
    except ImportError as error:
        package = _DRIVERS.get(protocol, "")
        install = f"`pip install {package}`" if package else "see fsspec's list of drivers"
        raise WhatifError(f"{url}: expected a driver for {protocol}://, got none; install it: {install}.") from error
    except Exception as error:
        raise WhatifError(f"{url}: expected an address that fsspec knows, got '{in_short(error)}'.") from error
    return files, str(path).rstrip("/")


@contextmanager
def reaching(url: str, hint: str) -> Iterator[None]:
    """Turn any error of a driver into a WhatifError of one sentence: each driver has its own error classes."""
    try:
        yield
    except WhatifError:
        raise
    except Exception as error:
        got = "nothing of that name" if isinstance(error, FileNotFoundError) else f"'{in_short(error)}'"
        raise WhatifError(f"{url}: expected to read and write there, got {got}; {hint}") from error


def is_folder(path: str | Path) -> bool:
    """Whether a path of this machine, or an address, is a folder."""
    if not is_address(path):
        return os.path.isdir(path)
    files, path_there = file_system(str(path))
    with reaching(str(path), _LOOK):
        return bool(files.isdir(path_there))


def recordings_in(folder: str | Path) -> list[str]:
    """Return the recordings directly in a folder of this or another machine."""
    if not is_address(folder):
        names = [str(file) for file in Path(folder).iterdir() if file.is_file()]
    else:
        files, path_there = file_system(str(folder))
        with reaching(str(folder), _LOOK):
            names = [files.unstrip_protocol(entry["name"]) for entry in files.ls(path_there, detail=True)
                     if entry["type"] == "file"]  # fmt: skip
    named = ((name, name.replace(os.sep, "/").rpartition("/")[2]) for name in names)
    return [name for name, last in named if last.endswith(RECORDING_SUFFIXES) and not last.startswith(".")]


@contextmanager
def local_copy(path: str | Path) -> Iterator[Path]:
    """Yield a local file with the bytes at ``path``: the file itself, or a copy of an address for the block.

    Errors inside the block name the address. Raises WhatifError if it cannot be read.
    """
    if not is_address(path):
        yield Path(path)
        return
    url = str(path)
    files, path_there = file_system(url)
    with tempfile.TemporaryDirectory(prefix="whatif-") as folder:
        local = Path(folder, url.rpartition("/")[2] or "recording")
        with reaching(url, _LOOK):
            files.get_file(path_there, str(local))
        try:
            yield local
        except WhatifError as error:
            error.args = tuple(str(arg).replace(str(local), url) for arg in error.args)
            raise


# -- contents of users' files ------------------------------------------------------------------------------------------

# An atom, a parenthesis, an alternative or a quantifier; anything else (look-around, a reference) is refused.
_TOKEN = re.compile(
    r"(?P<atom>\\[^\d]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[\](){}*+?|])"
    r"|(?P<open>\((?:\?:)?(?!\?))|(?P<close>\))|(?P<bar>\|)|(?P<times>(?:[*+]|\{\d*,?\d*\})[?+]?)|(?P<maybe>\?[?+]?)",
    re.DOTALL,
)
# The most ways to match that a matcher may have to try for one text: a tenth of a second of work.
MOST_TRIES = 5e6
# Names of kernels can be this long.
LONGEST_NAME = 2000


def read_at_most(path: str | Path, most_bytes: int) -> bytes:
    """Return a file's contents. Raises WhatifError if they are larger, OSError or ValueError if they are unreadable."""
    with Path(path).open("rb") as file:  # a device reports size 0 and never ends
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise WhatifError(
            f"{path}: expected a file of at most {most_bytes / 1e6:,.0f} MB, got a larger one; name another."
        )
    return content


def check_file_pattern(pattern: str, where: str, longest: int | None = None) -> None:
    """Refuse a pattern from a file that may take long: a repeated group, or too many ways to match.

    ``longest`` is the length limit of texts that it must match in full; without it, it may match anywhere in a name.
    Matching tries one alternative after another and one length of a repeat after another, so that "(a+)+b" takes years.
    Raises WhatifError.
    """
    tries, position, after_group = (1.0 if longest else LONGEST_NAME), 0, False
    bars = [0]  # alternatives of each open group; the outermost first
    why = ""
    while position < len(pattern) and not why:
        token = _TOKEN.match(pattern, position)
        if token is None:
            why = f"{pattern[position : position + 12]!r}"
            break
        kind, position = token.lastgroup, token.end()
        if kind == "times" and after_group:
            why = "a repeated group"
        elif kind == "times":
            tries *= longest or LONGEST_NAME
        elif kind == "maybe":
            tries *= 2
        elif kind == "bar":
            bars[-1] += 1
        elif kind == "open":
            bars.append(0)
        elif kind == "close" and len(bars) > 1:
            tries *= 1 + bars.pop()
        after_group = kind == "close"
    if not why and tries > MOST_TRIES:
        why = "too many repeats or alternatives"
    if why:
        raise WhatifError(
            f"{where}: expected a pattern that is fast to match (letters, classes, one or two repeats of these, groups "
            f"without repeats), got {pattern[:60]!r} with {why}; write out the names."
        )
