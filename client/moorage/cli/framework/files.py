"""Files that a caller names: read within a bound, and told where that cannot be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moorage.client.errors import Rejected


def read_within(file: Path | str, bytes_max: int) -> bytes:
    """What is in a file, or with `-` comes from stdin: at most one byte more than the bound, so that it is seen.

    Raises OSError.
    """
    if str(file) == "-":
        return sys.stdin.buffer.read(bytes_max + 1)
    with open(file, "rb") as opened:
        return opened.read(bytes_max + 1)


def cannot_read(file: Path | str, reason: str | None, fix: str) -> Rejected:
    """`reason` is the system's word for it."""
    from moorage.client.errors import rejected

    return rejected("invalid-argument", f"{file} cannot be read: {reason}", found=str(file), next=fix)


def cannot_write(file: Path | str, reason: str | None, fix: str, code: str = "failed-precondition") -> Rejected:
    """Return the same, of a file to be made."""
    from moorage.client.errors import rejected

    return rejected(code, f"{file} cannot be written: {reason}", found=str(file), next=fix)
