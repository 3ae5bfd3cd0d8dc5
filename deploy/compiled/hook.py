"""Puts the compiled modules into the wheel: `HATCH_BUILD_HOOKS_ENABLE=1 pip install .` (decision 0094).

Without that variable the wheel is pure Python, as an editable install always is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledHook(BuildHookInterface[Any]):
    """Compiles what `modules.txt` lists and adds it beside the sources, which stay: they are what a traceback shows."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":  # an editable install runs what is being edited
            return
        self._made = TemporaryDirectory(prefix="moorage-compiled-")
        made = Path(self._made.name).resolve()
        build = Path(self.root, "deploy", "compiled", "compile.py")
        subprocess.run([sys.executable, build, made], check=True, cwd=made)
        libraries = made / "lib"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update(
            (str(path), path.relative_to(libraries).as_posix()) for path in sorted(libraries.rglob("*.so"))
        )

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "standard":
            self._made.cleanup()
