"""Write files that only their owner may read."""

from __future__ import annotations

import os
from pathlib import Path


def replace_private(file: Path, content: bytes | str, *, is_synced: bool = True) -> None:
    """Write a file (0600), or replace it, atomically: whole or not at all. With `is_synced` its content is on the disk
    before it replaces an earlier file. Raises OSError."""
    partial = file.with_name(f".{file.name}.new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content if isinstance(content, bytes) else content.encode())
        opened.flush()
        if is_synced:
            os.fsync(opened.fileno())
    partial.replace(file)


def create_private(file: Path, content: bytes) -> None:
    """Write a new file (0600). An interrupted call leaves a part of it. Raises FileExistsError."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content)
