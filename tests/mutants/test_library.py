"""The mutants of a library run the tests of the folder that mirrors the file's."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.mutants.files import ROOT
from tests.mutants.library import CORE, config, core_files, count, tests_of


def test_each_file_of_the_core_has_tests_that_run_for_its_mutants() -> None:
    assert tests_of(CORE / "queue" / "queue.py") == Path("tests/scheduler/queue")
    for file in core_files():
        assert list((ROOT / tests_of(file)).rglob("test_*.py")), file


def test_the_library_is_told_one_file_and_its_tests() -> None:
    told = tomllib.loads(config(CORE / "queue" / "queue.py"))["cosmic-ray"]
    assert told["module-path"] == "scheduler/moorage/scheduler/core/queue/queue.py"
    assert told["test-command"].endswith("-m 'not slow' tests/scheduler/queue")


def test_a_report_is_counted_and_one_that_cannot_be_read_is_no_report() -> None:
    report = "total jobs: 40\ncomplete: 25 (62.50%)\nsurviving mutants: 3 (12.00%)\n"
    assert [count(report, name) for name in ("total jobs", "complete", "surviving mutants")] == [40, 25, 3]
    with pytest.raises(ValueError, match="surviving"):
        count("total jobs: 40", "surviving mutants")
