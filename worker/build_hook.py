"""Puts the worker's compiled programs into the wheel, or into the sources where the installation is editable; writes
into sdist and wheel which build they are, since no git is where they are installed.

The programs are two small C programs (decisions 0118 and 0140) and the limiter, a library (0157), built wherever there
is a C compiler, by `pip install .` and `pip install -e .` alike. Without a compiler the wheel is pure Python: a worker
starts jobs more slowly, its containers get no secrets, and it has no limiter.

`MOORAGE_PROGRAMS` says otherwise: `none` builds the pure wheel where there is a compiler, `all` fails where a program
cannot be built.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOM = Path("worker")
BUILD_FILE = Path("moorage", "system", "build.txt")
WORKER = Path("moorage", "worker")
PROGRAMS = {
    WORKER / "supervisor" / "launcher.bin": "jobs will start more slowly",
    WORKER / "drivers" / "container" / "entry.bin": "containers will get no secrets",
    WORKER / "sharing" / "limiter" / "limiter.bin": "no share of a GPU can be limited",
}


class ProgramsHook(BuildHookInterface[Any]):
    """Each program is beside its source, and `build.txt` beside `build.py`."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._wanted = os.environ.get("MOORAGE_PROGRAMS", "")
        if self._wanted not in ("", "none", "all"):
            raise SystemExit(f"MOORAGE_PROGRAMS={self._wanted}: allowed are none, all, or nothing")
        if version != "standard":  # an editable installation runs the sources
            for program in PROGRAMS:
                self._build(program, Path(self.root, ROOM, program))
            return
        self._made = TemporaryDirectory(prefix="moorage-programs-")
        named = Path(self._made.name).resolve() / BUILD_FILE.name
        named.write_text(f"{self.metadata.version}\n")
        inside = Path("system") / BUILD_FILE if self.target_name == "sdist" else BUILD_FILE
        build_data["force_include"][str(named)] = inside.as_posix()
        if self.target_name == "sdist" or self._wanted == "none":
            return
        for program in PROGRAMS:
            made = Path(self._made.name).resolve() / program.name
            if self._build(program, made):
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
                build_data["force_include"][str(made)] = program.as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "standard":
            self._made.cleanup()

    def _build(self, program: Path, made: Path) -> bool:
        build = Path(self.root, ROOM, "build_launcher.py")
        done = subprocess.run([sys.executable, build, made], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            told = f"{PROGRAMS[program]}, no {program.name}: {done.stderr.strip()}"
            if self._wanted == "all":
                raise SystemExit(told)
            self.app.display_warning(told)
        return done.returncode == 0
