"""Write the log of moorage's processes: each entry is one line, even with text of users, plus a traceback if any."""

from __future__ import annotations

import logging
import sys
from typing import Final

from moorage.schemas.printable import in_one_line, shown

LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s %(message)s"


class PrintableFormatter(logging.Formatter):
    """Escapes control characters in entries: subjects, reasons and names come from tenants, workers and the machine."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = in_one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        return shown(super().formatException(ei))  # type: ignore[arg-type]


def begin_log(level: str) -> None:
    """Write this process's log, from `level` on, to standard error; do nothing if it is set up already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(LOG_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
