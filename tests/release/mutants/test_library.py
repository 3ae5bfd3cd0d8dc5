"""The mutants of a library run the tests of the folder that mirrors the file's."""

from __future__ import annotations

import sqlite3
import tomllib
from pathlib import Path

from tests.release.mutants.files import ROOT
from tests.release.mutants.library import CORE, config, core_files, counts, named_tests


def test_each_file_of_the_core_has_tests_that_run_for_its_mutants() -> None:
    own, folder = named_tests(CORE / "queue" / "queue.py")
    assert (own, folder) == (Path("tests/unit/scheduler/queue/test_queue.py"), Path("tests/unit/scheduler/queue"))
    for file in core_files():
        assert list((ROOT / named_tests(file)[-1]).rglob("test_*.py")), file


def test_the_library_is_given_one_file_and_its_tests() -> None:
    given = tomllib.loads(config(CORE / "queue" / "queue.py"))["cosmic-ray"]
    assert given["module-path"] == "scheduler/moorage/scheduler/core/queue/queue.py"
    assert given["test-command"].endswith(
        "-m 'not slow' tests/unit/scheduler/queue/test_queue.py tests/unit/scheduler/queue"
    )


def test_mutants_that_are_left_out_or_were_not_tried_count_neither_as_caught_nor_as_survivors(tmp_path: Path) -> None:
    session = tmp_path / "session.sqlite"
    with sqlite3.connect(session) as base:
        base.execute("CREATE TABLE work_items (job_id)")
        base.execute("CREATE TABLE work_results (job_id, worker_outcome, test_outcome)")
        base.executemany("INSERT INTO work_items VALUES (?)", [(number,) for number in range(6)])
        results = [(0, "SKIPPED", None), (1, "NORMAL", "KILLED"), (2, "NORMAL", "KILLED"), (3, "NORMAL", "SURVIVED")]
        base.executemany("INSERT INTO work_results VALUES (?, ?, ?)", results)
    base.close()
    assert counts(session) == (5, 2, 1)
