"""Write the supervisor's log lines to standard error, which is the log file once it is detached."""

import contextlib
import os
from typing import Final

from moorage.system.proctree import boottime_s

AGAIN_S: Final = 30.0
"""Seconds before the same line is written again: a step that is tried ten times a second fails ten times a second."""
LINES_MAX: Final = 256
"""Lines remembered; beyond that all are forgotten."""

_said: Final[dict[str, float]] = {}


def log(line: str) -> None:
    """Write the line, unless it was written less than `AGAIN_S` seconds ago.

    An error is ignored: nothing that a job's end waits for may fail because of a full disk or a closed terminal.
    """
    now_s = boottime_s()
    if now_s < _said.get(line, -AGAIN_S) + AGAIN_S:
        return
    if len(_said) >= LINES_MAX:
        _said.clear()
    _said[line] = now_s
    with contextlib.suppress(OSError):
        os.write(2, f"{now_s:.3f} {line}\n".encode("utf-8", "backslashreplace"))
