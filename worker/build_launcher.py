"""Compile a C program of the worker: `python build_launcher.py PROGRAM`, whose name says which one.

Where that fails, say why and end with 1.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOM = Path(__file__).resolve().parent / "moorage" / "worker"
SOURCES = {"launcher.bin": ROOM / "supervisor" / "launcher.c", "entry.bin": ROOM / "drivers" / "entry.c"}
#: it runs in images that may have no library at all
STATIC_ONLY = "entry.bin"
FLAGS = ("-O2", "-s", "-std=gnu11", "-Wall", "-Wextra")


def build(program: Path, *more: str) -> None:
    """Put the program there, or remove an older one from there and raise SystemExit. `more` are flags."""
    program.unlink(missing_ok=True)
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or ""]
    if not compiler[0]:
        raise SystemExit("there is no C compiler")
    fresh = program.with_name(program.name + ".new")
    # The launcher statically, too, where that can be: there is less of it to clone.
    for flags in ((*FLAGS, *more, "-static"), (*FLAGS, *more))[: 1 if program.name == STATIC_ONLY else 2]:
        command = [*compiler, *flags, "-o", str(fresh), str(SOURCES[program.name])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise SystemExit(f"{compiler[0]}: {error.strerror}") from None
        if done.returncode == 0:
            fresh.chmod(0o755)
            fresh.rename(program)
            return
    raise SystemExit(done.stderr.strip())


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
