"""Which sources of a job's data are files on this machine, and which a job has kept."""

from __future__ import annotations

import os

from moorage.schemas.job import DATA_JOB
from moorage.schemas.kept_source import is_resolved


def is_here(source: str | os.PathLike[str]) -> bool:
    """Return whether a source is a file or folder here: a `Path`, or text as `./set`, `../set` or `~/set`."""
    return not isinstance(source, str) or source in (".", "..") or source.startswith(("./", "../", "~/"))


def is_kept(source: object) -> bool:
    """Return whether a source is what a job has kept, as people write it: `job:ID/path`."""
    return isinstance(source, str) and source.startswith(DATA_JOB) and not is_resolved(source)
