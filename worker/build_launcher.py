"""Compile a C program of the worker, or its library: `python build_launcher.py PROGRAM`, whose name says which one.

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
SOURCES = {
    "launcher.bin": ROOM / "supervisor" / "launcher.c",
    "entry.bin": ROOM / "drivers" / "container" / "entry.c",
    "limiter.bin": ROOM / "sharing" / "limiter" / "limiter.c",
}
FLAGS = ("-O2", "-s", "-std=gnu11", "-Wall", "-Wextra")
#: a library whose hooks call each other and no others of the same name; libdl is apart in images before glibc 2.34
LIBRARY = ("-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-Bsymbolic-functions,--no-as-needed", "-l:libdl.so.2")
#: what is tried, first to last. The launcher is static where that can be, since there is less of it to clone; the
#: entry runs in images that may have no library at all
WAYS = {"launcher.bin": (("-static",), ()), "entry.bin": (("-static",),), "limiter.bin": (LIBRARY,)}


def build(program: Path, *more: str) -> None:
    """Put the program there, or remove an older one from there and raise SystemExit. `more` are flags."""
    program.unlink(missing_ok=True)
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or ""]
    if not compiler[0]:
        raise SystemExit("there is no C compiler")
    fresh = program.with_name(program.name + ".new")
    for way in WAYS[program.name]:
        command = [*compiler, *FLAGS, *more, "-o", str(fresh), str(SOURCES[program.name]), *way]
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
