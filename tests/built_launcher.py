"""The launcher in C, built once for a test process: a supervisor builds one for each new folder, half a second each.

`moorage up`, in the tests of the command, has its own built.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from moorage.worker.supervisor.compiled_launcher import compiled_launcher


@cache
def _built() -> Path | None:
    folder = tempfile.mkdtemp(prefix="moorage-launcher-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = compiled_launcher(Path(folder), lambda line: None)
    return Path(program) if program else None


def hand_over(supervisors: Path) -> None:
    """Put it where the supervisor of this folder looks for it, which may not be there yet."""
    if (program := _built()) is not None:
        supervisors.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.copy(program, supervisors)
