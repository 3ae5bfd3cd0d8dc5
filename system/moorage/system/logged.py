"""The log of moorage's processes: each entry is one line, even if it has text of users in it."""

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
    """Write the log of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(LOG_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
