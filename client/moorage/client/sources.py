"""Which sources of a job's data are files on this machine."""

from __future__ import annotations

import os


def is_here(source: str | os.PathLike[str]) -> bool:
    """Return whether a source is a file or folder here: a `Path`, or text as `./set`, `../set` or `~/set`."""
    return not isinstance(source, str) or source in (".", "..") or source.startswith(("./", "../", "~/"))
