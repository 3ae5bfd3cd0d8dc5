"""Reads files that the user names, up to a bound, and makes the errors for files that cannot be read or written."""

from __future__ import annotations

import sys
from codecs import BOM_UTF8
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moorage.client.errors import Rejected


def read_within(file: Path | str, bytes_max: int) -> bytes:
    """Return the content of a file, or of stdin for `-`: up to `bytes_max` + 1 bytes, so that the caller sees when it
    is too long. A byte order mark at its beginning, which editors of Windows write, is skipped.

    Raises OSError.
    """
    if str(file) == "-":
        return sys.stdin.buffer.read(bytes_max + 1).removeprefix(BOM_UTF8)
    with open(file, "rb") as opened:
        return opened.read(bytes_max + 1).removeprefix(BOM_UTF8)


def cannot_read(file: Path | str, reason: str | None, fix: str) -> Rejected:
    """Return the error for a file that cannot be read. `reason` is the text of the system's error."""
    from moorage.client.errors import rejected

    return rejected("invalid-argument", f"{file} cannot be read: {reason}", found=str(file), next=fix)


def cannot_write(file: Path | str, reason: str | None, fix: str, code: str = "failed-precondition") -> Rejected:
    """Return the error for a file that cannot be written. `reason` is the text of the system's error."""
    from moorage.client.errors import rejected

    return rejected(code, f"{file} cannot be written: {reason}", found=str(file), next=fix)
