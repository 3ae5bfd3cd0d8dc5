"""The log as JSON: one object a line, whatever stands in an entry."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings

import pytest

from moorage.schemas.errors import problem
from moorage.system.logged import JsonFormatter, begin_log, log_problem


def test_an_entry_is_one_object_with_its_traceback_in_it() -> None:
    log, written = logging.Logger("moorage.worker"), io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    log.addHandler(handler)
    log.warning("job %s", "two\nlines \x1b[31m \udcff")
    try:
        raise ValueError("not\nso")
    except ValueError:
        log.exception("broke")
    first, second = map(json.loads, written.getvalue().splitlines())
    assert list(first) == ["ts", "level", "logger", "message"]
    assert first["message"] == "job two\nlines \x1b[31m \\udcff"
    assert (first["level"], first["logger"]) == ("WARNING", "moorage.worker")
    assert first["ts"].endswith("Z")
    assert second["message"] == "broke"
    assert second["error"].startswith("Traceback")
    assert second["error"].endswith("ValueError: not\nso")


def fresh(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What stands on standard error of a process that has no log yet; pytest's own is there by now."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.root, "handlers", [])
    for of, name in (
        (sys, "excepthook"),
        (sys, "unraisablehook"),
        (threading, "excepthook"),
        (warnings, "showwarning"),
    ):
        monkeypatch.setattr(of, name, getattr(of, name))
    monkeypatch.setattr(logging, "_warnings_showwarning", None)
    return stream


class Breaks:
    def __del__(self) -> None:
        raise ValueError("at its end")


def _breaks() -> None:
    raise ValueError("in a thread")


@pytest.mark.filterwarnings("default")
def test_all_that_is_written_to_standard_error_is_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    written = fresh(monkeypatch)
    begin_log("INFO", "json")
    print("error[x]: no\n\nfix: so", file=sys.stderr)
    warnings.warn("old", DeprecationWarning, stacklevel=1)
    thread = threading.Thread(target=_breaks)
    thread.start()
    thread.join()
    Breaks()
    try:
        raise ValueError("uncaught")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    assert log_problem(problem("not-leading", "silent", next="wait"))
    entries = [json.loads(line) for line in written.getvalue().splitlines()]
    found = [(entry["level"], entry["logger"], entry["message"].splitlines()[0]) for entry in entries]
    uncaught = "an exception that nobody caught: ValueError"
    assert [each for each in found if "DeprecationWarning" not in each[2]] == [
        ("ERROR", "stderr", "error[x]: no"),
        ("INFO", "stderr", "fix: so"),
        ("CRITICAL", "moorage", f"{uncaught}('in a thread')"),
        ("CRITICAL", "moorage", f"{uncaught}('at its end')"),
        ("CRITICAL", "moorage", f"{uncaught}('uncaught')"),
        ("ERROR", "moorage", "error[not-leading]: silent; fix: wait"),
    ]
    assert [each[:2] for each in found if "DeprecationWarning" in each[2]] == [("WARNING", "py.warnings")]
    assert sum(entry.get("error", "").startswith("Traceback") for entry in entries) == 3


def test_a_log_of_text_leaves_standard_error_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    written = fresh(monkeypatch)
    begin_log("INFO", "text")
    assert sys.stderr is written
    assert not log_problem(problem("not-leading", "silent"))
