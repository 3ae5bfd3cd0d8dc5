"""What the measured job is, for every system alike: a program that writes its own clock as its first act.

A shell and date(1) take longer to start than what is measured, in ours and in theirs, and hide it.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).resolve().with_name("stick.c")
BUILT = SOURCE.parents[3] / ".cache" / "peers" / "stick"
#: without a C library, where the source knows how: its start would be most of what is measured
BARE = ("-nostdlib", "-ffreestanding", "-fno-stack-protector") if platform.machine() == "x86_64" else ()
SHELL = ("/bin/sh", "-c", 'date +%s%N > "$0"')


@functools.cache
def stick() -> tuple[str, ...]:
    """The command, less its last argument: the file to write to. A shell's where no C compiler is there."""
    if shutil.which("gcc") is None:
        return SHELL
    if not BUILT.exists() or BUILT.stat().st_mtime < SOURCE.stat().st_mtime:
        BUILT.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["gcc", "-O2", "-static", *BARE, "-o", str(BUILT), str(SOURCE)], check=True)
    return (str(BUILT),)


def told() -> str:
    """What the job was, for the page."""
    if stick() == SHELL:
        return "a shell that asks date(1), for want of gcc: its own start is in the figure"
    bare = ". It has no C library, whose start would cost more than the kernel's" if BARE else ""
    return f"one small static program that reads the clock first, the same for all{bare}"
