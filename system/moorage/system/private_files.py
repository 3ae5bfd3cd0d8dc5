"""Write files that only their owner may read."""

from __future__ import annotations

import os
from pathlib import Path


def replace_private(file: Path, text: str) -> None:
    """Write a file (0600), or replace it, atomically: whole or not at all. The text is synced to the disk first."""
    partial = file.with_name(f".{file.name}.new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)


def create_private(file: Path, content: bytes) -> None:
    """Write a new file (0600). An interrupted call leaves a part of it. Raises FileExistsError."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content)
