"""Write the log of moorage's processes: each entry is one line, even with text of users, plus a traceback if any. As
JSON, the traceback is in that line."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

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


def begin_log(level: str, form: LogFormat = "text") -> None:
    """Write this process's log, from `level` on, to standard error; do nothing if it is set up already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else PrintableFormatter(LOG_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
