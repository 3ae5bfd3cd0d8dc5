"""Write the second archive of a VM's initramfs: the guest's first process, and the files of the job's folder as /work.

The kernel unpacks archives one after the other, and a later one overrides an earlier one. The format is cpio's "newc",
as in the kernel's documentation of the initramfs.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO, Final

#: where the first process and the job's folder are in the guest
INIT: Final = "moorage/init"
WORK: Final = "work"
#: size of one file: the format has 32 bits for it
FILE_BYTES_MAX: Final = (1 << 32) - 1
_GUEST: Final = Path(__file__).with_name("guest.sh")
_END: Final = "TRAILER!!!"


def write(into: BinaryIO, base: Path, folder: str) -> None:
    """Write the operator's initramfs `base`, then moorage's additions.

    /work gets the contents of `folder`; "" for none. Of the folder, only files, folders and symbolic links are written.
    No process may write to the folder meanwhile. Raises OSError, also for a file that is too large.
    """
    with base.open("rb") as source:
        shutil.copyfileobj(source, into)
    _pad(into)
    _folder(into, os.path.dirname(INIT))
    _entry(into, INIT, stat.S_IFREG | 0o755, _GUEST.read_bytes())
    _folder(into, WORK)
    for above, folders, files in os.walk(folder) if folder else ():
        for name in sorted(folders + files):
            path = os.path.join(above, name)
            place = os.path.join(WORK, os.path.relpath(path, folder))
            about = os.lstat(path)
            if stat.S_ISLNK(about.st_mode):
                _entry(into, place, stat.S_IFLNK | 0o777, os.fsencode(os.readlink(path)))
            elif stat.S_ISDIR(about.st_mode):
                _folder(into, place)
            elif stat.S_ISREG(about.st_mode):
                _file(into, place, path, about)
    _entry(into, _END, 0)


def _folder(into: BinaryIO, name: str) -> None:
    _entry(into, name, stat.S_IFDIR | 0o755)


def _file(into: BinaryIO, name: str, path: str, about: os.stat_result) -> None:
    if about.st_size > FILE_BYTES_MAX:
        raise OSError(f"{name} takes more than {FILE_BYTES_MAX} bytes")
    _head(into, name, about.st_mode, about.st_size, int(about.st_mtime))
    with open(path, "rb") as source:
        shutil.copyfileobj(source, into)
    _pad(into)


def _entry(into: BinaryIO, name: str, mode: int, data: bytes = b"") -> None:
    _head(into, name, mode, len(data), 0)
    into.write(data)
    _pad(into)


def _head(into: BinaryIO, name: str, mode: int, size: int, mtime: int) -> None:
    """Write the header of an entry. Its numbers: inode, mode, uid, gid, links, mtime, size, four of devices, length of
    the name, checksum.
    """
    raw = os.fsencode(name) + b"\0"
    numbers = (0, mode, 0, 0, 1, max(0, mtime) & FILE_BYTES_MAX, size, 0, 0, 0, 0, len(raw), 0)
    into.write(b"070701" + b"".join(b"%08X" % number for number in numbers) + raw)
    _pad(into)


def _pad(into: BinaryIO) -> None:
    into.write(b"\0" * (-into.tell() % 4))
