"""Files that only their owner may read, each written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_private(file: Path, text: str) -> None:
    """Write a file (0600) in place of an existing one. When this returns, it is on the disk."""
    partial = file.with_name(f".{file.name}.new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)


def create_private(file: Path, content: bytes) -> None:
    """Write a new file (0600). Raises FileExistsError."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content)
