"""Find the disk images that jobs in VMs may name: files in folders that the operator chooses."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

#: the format for QEMU by the end of a file's name: guessing from the content would let the content choose it
FORMATS: Final = {".qcow2": "qcow2", ".raw": "raw", ".img": "raw"}


def format_of(image: str) -> str | None:
    """Return the format of an image with this name; None if it has no known suffix."""
    return FORMATS.get(os.path.splitext(image)[1])


def find(image: str, folders: Iterable[str]) -> str | None:
    """Return the path of an image in the first of these folders that has it, with links followed.

    None if no folder has a file of this name, with a known suffix, whose links stay inside that folder.
    """
    for folder in map(os.path.realpath, folders):
        path = os.path.realpath(os.path.join(folder, image))
        if Path(path).is_relative_to(folder) and os.path.isfile(path) and format_of(path) is not None:
            return path
    return None
