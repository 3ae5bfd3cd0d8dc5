"""The three streams that a command finds: closed, or of an encoding that cannot say all; imports next to nothing."""

from __future__ import annotations

import io
import os
import sys


def stand_on_any_streams() -> None:
    """Let a word of ours fail on no stream that the caller chose.

    One that is closed (`>&-`) becomes /dev/null, so that no file of ours gets its number and is written to; a letter
    that the terminal's encoding lacks (`LC_ALL=POSIX`, PYTHONIOENCODING) is written as an escape. Once, at the start.
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
