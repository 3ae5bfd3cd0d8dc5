"""The log as JSON: one object a line, whatever stands in an entry."""

from __future__ import annotations

import io
import json
import logging

from moorage.system.logged import JsonFormatter


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
