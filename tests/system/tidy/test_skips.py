"""In CI a skip is a failure, but for want of a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_here():
    pytest.skip("no tool here")

@pytest.fixture
def tool():
    pytest.skip("no tool here")

@pytest.mark.docker
def test_in_a_fixture(tool):
    pass

@pytest.mark.gpu
def test_a_gpu():
    pytest.skip("no GPU here")

@pytest.mark.xfail
def test_expected():
    assert False
"""
MODULE = """
import pytest

pytest.skip("not on this system", allow_module_level=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ci", "closing"),
    [
        ("true", "1 failed, 1 skipped, 1 xfailed, 2 errors"),
        ("", "4 skipped, 1 xfailed"),
        ("false", "4 skipped, 1 xfailed"),
    ],
)
def test_what_a_skip_is(tmp_path: Path, ci: str, closing: str) -> None:
    (tmp_path / "test_tests.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  docker\n  gpu\n")
    options = ["-p", "tests.skips", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", str(tmp_path / "pytest.ini"), str(tmp_path)],
        env=os.environ | {"CI": ci, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert closing in done.stdout.splitlines()[-1], done.stdout
    assert ("no tool here" in done.stdout) == (ci == "true")
