"""Puts the compiled launcher of jobs into the wheel, or into the sources where the installation is editable.

It is one small C program (decision 0118), built wherever there is a C compiler, by `pip install .` and
`pip install -e .` alike. Without a compiler the wheel is pure Python, and a worker starts jobs more slowly.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOM = Path("worker")
LAUNCHER = Path("moorage", "worker", "supervisor", "launcher.bin")


class LauncherHook(BuildHookInterface[Any]):
    """The launcher stands beside its source."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":  # an editable installation runs the sources
            self._build(Path(self.root, ROOM, LAUNCHER))
            return
        self._made = TemporaryDirectory(prefix="moorage-launcher-")
        launcher = Path(self._made.name).resolve() / LAUNCHER.name
        if self._build(launcher):
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["force_include"][str(launcher)] = LAUNCHER.as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "standard":
            self._made.cleanup()

    def _build(self, program: Path) -> bool:
        build = Path(self.root, ROOM, "build_launcher.py")
        done = subprocess.run([sys.executable, build, program], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            self.app.display_warning(f"jobs will start more slowly, no compiled launcher: {done.stderr.strip()}")
        return done.returncode == 0
