"""Pack a campaign's folder into a few files of limited size, the most valuable traces first."""

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from whatif.runtime.files import replacing

MB = 1_000_000

# Bytes that tar adds to each member (its header, and padding of its last block), and at the file's end.
MEMBER_BYTES, END_BYTES = 2 * tarfile.BLOCKSIZE, 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE


def pack(out: Path, target: Path, names: Sequence[str], *, file_bytes: int, files: int) -> tuple[list[Path], list[str]]:
    """Write all records and the traces that fit; return the files, and the names of the runs whose traces do not.

    `target` "x.tar" gives "x-1.tar", "x-2.tar" and so on: at most `files` of at most `file_bytes` each. The first holds
    the records and, in left_out.txt, the names of omitted traces. `names` are the runs, the most valuable
    first. Raises WhatifError when the files cannot be written.
    """
    records = [path for name in names if (path := out / f"{name}.json").exists()]
    traces = [path for name in names if (path := out / f"{name}.trace.json.gz").exists()]
    # The list of omitted traces is written last, so space for all names is reserved.
    reserved = END_BYTES + MEMBER_BYTES + sum(len(path.name) + 1 for path in traces)
    used = [sum(map(_packed_bytes, records)) + reserved]
    members = [records]
    left_out = []
    for path in traces:
        size = _packed_bytes(path)
        place = next((i for i, used_bytes in enumerate(used) if used_bytes + size <= file_bytes), len(used))
        if place == files or END_BYTES + size > file_bytes:
            left_out.append(path.name.removesuffix(".trace.json.gz"))
            continue
        if place == len(used):
            used.append(END_BYTES)
            members.append([])
        used[place] += size
        members[place].append(path)
    written = [target.with_name(f"{target.stem}-{number}.tar") for number in range(1, len(members) + 1)]
    for path, paths in zip(written, members, strict=True):
        _write(path, paths, left_out if path == written[0] else None)
    return written, left_out


def _write(path: Path, members: Sequence[Path], left_out: Sequence[str] | None) -> None:
    with replacing(path) as part, tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as archive:
        for member in members:
            archive.add(member, member.name, filter=_anonymous)
        if left_out is not None:
            text = "".join(f"{name}\n" for name in left_out).encode()
            info = tarfile.TarInfo("left_out.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _packed_bytes(path: Path) -> int:
    return path.stat().st_size + MEMBER_BYTES
