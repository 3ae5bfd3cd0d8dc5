"""Files that a job has kept as a source of another job's data: `job:ID[:REPLICAS][@ACCEPTED_MS][/path]`.

People write `job:ID/path`; the client adds which replicas there are and when the job was accepted, so that the same id
stands for the same files on every worker that has them.
"""

from __future__ import annotations

import re
from typing import Final

from moorage.schemas.job import DATA_JOB, FilesOf

_SOURCE: Final = re.compile(rf"{DATA_JOB}([A-Za-z0-9_-]+)(?::([0-9,-]+))?(?:@(\d+))?(/.*)?", re.ASCII)


def kept_source(files: FilesOf, path: str = "") -> str:
    """Return the source that stands for these files, or for what is at `path`, "" or `/out`, among them."""
    replicas = "" if files.replicas is None else ":" + files.replicas.replace(" ", "")
    return f"{DATA_JOB}{files.job}{replicas}@{files.accepted_ms}{path}"


def read_source(source: str) -> tuple[FilesOf, str]:
    """Return which files a source of a valid request is, and where they lie in the attempt's folder: below its job."""
    found = _SOURCE.fullmatch(source)
    assert found is not None, source
    job, replicas, accepted_ms, path = found.groups()
    return FilesOf(job, replicas, int(accepted_ms or 0)), job + (path or "").rstrip("/")


def is_resolved(source: str) -> bool:
    """Return whether a source says of which acceptance of its job the files are."""
    found = _SOURCE.fullmatch(source)
    return found is not None and found[3] is not None
