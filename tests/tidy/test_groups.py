"""Tests that share what is made for them run in one process, and the longest groups begin first."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.groups import LONGEST, OF_ONE_STACK, ROOT, group_of, put_longest_first


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/schemas/test_release.py::test_what_is_a_release[1::2]", "tests/schemas/test_release.py"),
        (
            "tests/worker/drivers/test_conformance.py::TestVm::test_start",
            "tests/worker/drivers/test_conformance.py::TestVm",
        ),
        ("tests/bus/test_inbox.py::test_a[container]", "containers of tests/bus"),
        ("tests/live/test_releases.py::test_a[container-0.2]", "containers of tests/live"),
        ("tests/live/test_releases.py::test_a[wheel-0.2]", "tests/live/test_releases.py::test_a[wheel-0.2]"),
        (f"{OF_ONE_STACK[0]}::test_a", OF_ONE_STACK[0]),
        ("tests/cli/test_jobs.py::test_a", "node of tests/cli"),
        ("tests/client/test_client.py::test_a", "node of tests/client"),
        ("tests/tidy/test_circles.py::test_a", "tests/tidy/"),
    ],
)
def test_a_test_is_of_the_group_that_shares_with_it(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group


def test_long_groups_come_first_then_those_of_many_tests() -> None:
    files = ["tests/bus/test_inbox.py", *["tests/bus/test_target.py"] * 2, "tests/sim/test_wide.py"]
    items: list[Any] = [SimpleNamespace(nodeid=f"{file}::test_{at}") for at, file in enumerate(files)]
    put_longest_first(items)
    assert [each.nodeid[-1] for each in items] == ["3", "1", "2", "0"]


def test_each_long_group_is_there() -> None:
    for name in LONGEST:
        assert name in ("containers of", "node of") or (ROOT / name).exists(), name


@pytest.mark.slow
def test_the_processes_of_a_run_have_whole_groups() -> None:
    """Marks that xdist finds no more once spread all tests, and nobody saw it."""
    files = ["tests/schemas/test_release.py", "tests/schemas/test_states.py"]
    words = ["-n", "2", "--dist", "loadscope", "-v", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *files], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ran = {(file, process) for process, file in re.findall(r"\[(gw\d)\].* PASSED (\S+?)::", done.stdout)}
    assert len(ran) == len(files), ran
