"""Handles reports of readiness: a running attempt is ready for work, or is not any more, and where it is reached."""

from __future__ import annotations

import re
from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.state import TELLS_READY, Attempt
from moorage.schemas.frames import Report

READINESS: Final = frozenset({"ready", "not-ready"})
#: a name or an address of a host, as a worker's setting `address` takes it, and an IPv6 address in brackets
_HOST: Final = re.compile(r"[A-Za-z0-9_.:%\[\]-]{1,255}")


def is_address(detail: str, ports_max: int = 1) -> bool:
    """Return whether a report's detail is an `address:port` that others may be told, with up to so many ports, split by
    commas."""
    address, _, ports = detail.rpartition(":")
    if _HOST.fullmatch(address) is None or ports.count(",") >= ports_max:
        return False
    return all(
        port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= 65535 for port in ports.split(",")
    )


def on_readiness(draft: Draft, attempt: Attempt, report: Report) -> None:
    """Write what follows from a report of a kind in `READINESS`; do nothing if it says what is known."""
    is_ready = report.kind == "ready"
    if attempt.replica.state in TELLS_READY and attempt.ready != is_ready:
        draft.ready(attempt, is_ready, report.detail)
