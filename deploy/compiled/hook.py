"""Puts what is compiled into the wheel: the launcher of jobs, and if wanted the scheduling core.

The launcher (decision 0118) is one small C program. It is built wherever there is a C compiler, by `pip install .` and
`pip install -e .` alike; without one, a worker starts jobs more slowly. The scheduling core (decision 0094) is compiled
with `HATCH_BUILD_HOOKS_ENABLE=1 pip install .` alone.
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

HERE = Path("deploy", "compiled")
LAUNCHER = Path("moorage", "worker", "supervisor", "launcher.bin")


class CompiledHook(BuildHookInterface[Any]):
    """Compiled files stand beside their sources, which are what a traceback shows."""

    PLUGIN_NAME = "custom"

    @property
    def _compiles_core(self) -> bool:
        return os.environ.get("HATCH_BUILD_HOOKS_ENABLE", "").lower() in ("1", "true")

    def dependencies(self) -> list[str]:
        """What mypyc needs, and what mypy reads the types of."""
        names = ("nats-py", "msgspec", "numpy")
        found = [each for each in self.metadata.core.dependencies if each.startswith(names)]
        return ["mypy>=2.4,<3", "setuptools>=80", *found] if self._compiles_core else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":  # an editable install runs what is being edited
            self._build_launcher(Path(self.root, "worker", LAUNCHER))
            return
        self._made = TemporaryDirectory(prefix="moorage-compiled-")
        made = Path(self._made.name).resolve()
        launcher = made / LAUNCHER.name
        if self._build_launcher(launcher):
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["force_include"][str(launcher)] = LAUNCHER.as_posix()
        if self._compiles_core:
            self._compile_core(made, build_data)

    def _build_launcher(self, program: Path) -> bool:
        build = Path(self.root, HERE, "launcher.py")
        done = subprocess.run([sys.executable, build, program], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            self.app.display_warning(f"jobs will start more slowly, no compiled launcher: {done.stderr.strip()}")
        return done.returncode == 0

    def _compile_core(self, made: Path, build_data: dict[str, Any]) -> None:
        build = Path(self.root, HERE, "compile.py")
        subprocess.run([sys.executable, build, made], check=True, cwd=made)
        libraries = made / "lib"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data.pop("tag", None)
        build_data["force_include"].update(
            (str(path), path.relative_to(libraries).as_posix()) for path in sorted(libraries.rglob("*.so"))
        )

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "standard":
            self._made.cleanup()
