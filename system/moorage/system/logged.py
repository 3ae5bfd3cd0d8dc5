"""Write the log of moorage's processes: each entry is one line, even with text of users, plus a traceback if any. As
JSON, the traceback is in that line."""

from __future__ import annotations

import io
import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Literal, TextIO

import msgspec

from moorage.schemas.errors import Problem
from moorage.schemas.printable import carried, in_one_line, shown

LogFormat = Literal["text", "json"]
LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s %(message)s"


class PrintableFormatter(logging.Formatter):
    """Escapes control characters in entries: subjects, reasons and names come from tenants, workers and the machine."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = in_one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        return shown(super().formatException(ei))  # type: ignore[arg-type]


class JsonFormatter(logging.Formatter):
    """Writes an entry as one JSON object: `ts` (RFC 3339, UTC), `level`, `logger`, `message`, and `error` with the
    traceback, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "ts": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname,
            "logger": record.name,
            "message": carried(record.getMessage()),
        }
        if record.exc_info:
            entry["error"] = carried(self.formatException(record.exc_info))
        return msgspec.json.encode(entry).decode()


class JsonLines(io.TextIOBase):
    """Takes the place of standard error, and makes an entry of each line that is written to it.

    Such lines are the last words of a command, warnings of the interpreter, and whatever a library prints. An error is
    of level ERROR, a warning of WARNING, else it is INFO.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._log_line(line)
        return len(text)

    def _log_line(self, line: str) -> None:
        if line.strip():
            word = line.lstrip().lower()
            level = "ERROR" if word.startswith("error") else "WARNING" if word.startswith("warning") else "INFO"
            entry = {"ts": datetime.now(UTC), "level": level, "logger": "stderr", "message": carried(line)}
            self._stream.write(msgspec.json.encode(entry).decode() + "\n")

    def flush(self) -> None:
        self._stream.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()


def begin_log(level: str, form: LogFormat = "text") -> None:
    """Write this process's log, from `level` on, to standard error; do nothing if it is set up already.

    As JSON, all that this process writes to standard error from now on is entries: exceptions that nobody catches, in
    threads, too; warnings; and what is printed. What the C library writes by itself stays as it is.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else PrintableFormatter(LOG_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    if form == "json" and not is_json():
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda of: _log_uncaught(of.exc_type, of.exc_value, of.exc_traceback)
        sys.unraisablehook = lambda of: _log_uncaught(of.exc_type, of.exc_value, of.exc_traceback)
        sys.stderr = JsonLines(sys.stderr)


def is_json() -> bool:
    """Return whether all that this process writes to standard error is entries in JSON."""
    return isinstance(sys.stderr, JsonLines)


def log_problem(told: Problem) -> bool:
    """Log why this process ends, as one entry with the way out, if the log is JSON; return whether it is."""
    if is_json():
        fix = f"; fix: {told.next}" if told.next else ""
        logging.getLogger("moorage").error("error[%s]: %s%s", told.code, told.message, fix)
    return is_json()


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    entry = (kind, error or kind(), traceback)
    logging.getLogger("moorage").critical("an exception that nobody caught: %r", error, exc_info=entry)
