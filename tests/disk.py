"""A file system of a test's own that is small enough to fill, where this user may mount one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

#: room for the request queue as it is by default, and a load of jobs beside it
SIZE_MIB: Final = 1400
#: streams are as large as there is room for: this is enough for a few jobs
TINY_MIB: Final = 96


def mount_small(folder: Path, size_mib: int = SIZE_MIB) -> bool:
    """Mount a tmpfs of this size on `folder`, which is made; False where that is not allowed."""
    folder.mkdir()
    options = f"size={size_mib}m"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    return done.returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leaving: int = 0) -> Path:
    """Take all the room that is left, to the last byte, or but for the bytes `leaving`; delete what it returns to have
    room again."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        chunk = b"\0" * (1 << 20)
        while chunk:
            try:
                written = file.write(chunk)
            except OSError:
                written = 0
            if written < len(chunk):
                chunk = chunk[: len(chunk) // 2]
        file.truncate(max(0, file.tell() - leaving))
    return filler
