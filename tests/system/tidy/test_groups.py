"""Tests that share what is made for them run in one process, and the longest groups begin first."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.groups import LONGEST, ROOT


def test_each_long_group_is_there() -> None:
    for name in LONGEST:
        assert name in ("containers of", "node of") or (ROOT / name).exists(), name


@pytest.mark.slow
def test_the_processes_of_a_run_have_whole_groups() -> None:
    """Marks that xdist finds no more once spread all tests, and nobody saw it."""
    files = ["tests/system/schemas/test_release.py", "tests/unit/schemas/test_states.py"]
    words = ["-n", "2", "--dist", "loadscope", "-v", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *files], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ran = {(file, process) for process, file in re.findall(r"\[(gw\d)\].* PASSED (\S+?)::", done.stdout)}
    assert len(ran) == len(files), ran
