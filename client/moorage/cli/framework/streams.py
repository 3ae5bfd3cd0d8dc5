"""Makes stdin, stdout and stderr usable however the caller left them: closed, or in an encoding that lacks letters.
Imports next to nothing."""

from __future__ import annotations

import io
import os
import sys


def stand_on_any_streams() -> None:
    """Make sure that no output fails because of how the caller set up the streams. Call it once, at the start.

    A closed stream (`>&-`) becomes /dev/null, so that no file of ours gets its number and its output. A letter that the
    terminal's encoding lacks (`LC_ALL=POSIX`, PYTHONIOENCODING) is written as an escape.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:  # else the lowest that is free was the one that is closed
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
        elif number and isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")
