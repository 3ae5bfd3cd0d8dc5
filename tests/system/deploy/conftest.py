"""What is published, made once for the tests that install it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import dist


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheels, as `make dist` makes them. Skips where no package index answers."""
    folder = tmp_path_factory.mktemp("dist")
    asking = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder / "asked"), "hatchling"]
    if subprocess.run(asking, capture_output=True, check=False).returncode:
        pytest.skip("no index of packages answers")
    dist.make(folder / "dist")
    return folder / "dist"
