"""Compile the modules of `modules.txt` with mypyc: `python compile.py FOLDER` leaves the libraries in FOLDER/lib.

Needs a C compiler, Python's headers, mypy, setuptools, and what moorage itself depends on (mypy reads its types). Ends
with exit code 1 and mypyc's own words where a module cannot be compiled.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("schemas", "bus", "scheduler", "worker", "client")


def modules() -> list[Path]:
    """The files that `modules.txt` names: a line is a glob, and with `!` before it what that leaves out."""
    chosen: dict[Path, None] = {}
    for line in (ROOT / "deploy" / "compiled" / "modules.txt").read_text("utf-8").splitlines():
        pattern = line.partition("#")[0].strip()
        if not pattern:
            continue
        found = sorted(ROOT.glob(pattern.removeprefix("!")))
        if not found:
            raise SystemExit(f"modules.txt: no file is named by {pattern!r}")
        for path in found:
            if pattern.startswith("!"):
                chosen.pop(path, None)
            elif path.name != "__init__.py":
                chosen[path] = None
    return list(chosen)


def build(folder: Path) -> None:
    from mypyc.build import mypycify
    from setuptools import setup

    os.environ["MYPYPATH"] = os.pathsep.join(str(ROOT / room) for room in ROOMS)
    extensions = mypycify(
        ["--config-file", str(ROOT / "pyproject.toml"), *map(str, modules())],
        opt_level="2",
        debug_level="0",
        multi_file=True,
        target_dir=str(folder / "c"),
        group_name="moorage",
    )
    jobs = os.cpu_count() or 1
    setup(
        name="moorage-compiled",
        packages=[],
        ext_modules=extensions,
        script_args=[
            "--quiet",
            "build_ext",
            f"--build-lib={folder / 'lib'}",
            f"--build-temp={folder / 'o'}",
            f"--parallel={jobs}",
        ],
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
