"""Frames of what a running attempt reports of itself, as its loss: the newest value of each name, and the last rows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from moorage.schemas.frames.version import VERSION
from moorage.schemas.ranges import NUMBERS_MAX

#: names of one attempt, and of one row
REPORTED_NAMES_MAX: Final = 16
NAME_CHARS_MAX: Final = 64
#: a value that is text
TEXT_CHARS_MAX: Final = 64
#: the newest values of one attempt, as JSON
VALUES_BYTES_MAX: Final = 1024
#: a line that a job writes
LINE_BYTES_MAX: Final = 4096
#: rows that are kept of an attempt, and the bytes at the end of what it has written in which they are looked for
ROWS_MAX: Final = 500
TAIL_BYTES: Final = 64 * 1024
_NAME: Final = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_./@:%-]{{0,{NAME_CHARS_MAX - 1}}}")

_Fence = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
_Replica = Annotated[int, msgspec.Meta(ge=0, lt=NUMBERS_MAX)]

Value = int | float | bool | str
Values = dict[str, Value]


class Reported(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What an attempt has reported: the newest value of each name, and why a line of it was refused last."""

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    values: Values = {}
    refused: str = ""


class ReportsAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The question of `moorage.api.<tenant>.reports`: the last rows that a running replica has reported."""

    job: str
    replica: _Replica = 0


class ReadReports(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="read-reports"):
    """The leader asks a worker for the rows of a running attempt. `session` proves that the leader asks."""

    session: str
    tenant: str
    job: str
    replica: _Replica
    attempt: _Fence
    fence: _Fence
    v: int = VERSION


class ReportsPage(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="reports-page"):
    """The last rows that an attempt has reported, the oldest first: at most 500, of the last 64 KiB that it wrote."""

    replica: int
    attempt: int
    rows: list[Values] = []
    worker: str = ""
    v: int = VERSION


def row_of(line: bytes) -> Values:
    """Return the values of a line that a job has written: a JSON object of numbers, true, false and short texts.

    Raises ValueError, whose message says what is wrong with it.
    """
    if len(line) > LINE_BYTES_MAX:
        raise ValueError(f"it has {len(line)} bytes, of at most {LINE_BYTES_MAX}")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not isinstance(row, dict):
        raise ValueError('it is no JSON object, as {"step": 1, "loss": 0.5}')
    if len(row) > REPORTED_NAMES_MAX:
        raise ValueError(f"it has {len(row)} names, of at most {REPORTED_NAMES_MAX}")
    for name, value in row.items():
        if trouble := _trouble(name, value):
            raise ValueError(trouble)
    return row


def fits(values: Mapping[str, Value]) -> bool:
    """Return whether the newest values of an attempt are within their bounds."""
    few = len(values) <= REPORTED_NAMES_MAX and not any(_trouble(name, value) for name, value in values.items())
    return few and len(msgspec.json.encode(values)) <= VALUES_BYTES_MAX


def _trouble(name: str, value: Any) -> str:
    if _NAME.fullmatch(name) is None:
        return f"{name[:80]!r} is no name: letters, digits and _./@:%-, at most {NAME_CHARS_MAX}"
    if isinstance(value, bool):
        return ""
    if isinstance(value, str):
        return f"{name} has {len(value)} characters, of at most {TEXT_CHARS_MAX}" if len(value) > TEXT_CHARS_MAX else ""
    if not isinstance(value, int | float):
        return f"{name} is {_kind(value)}, not a number, true, false or a text"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name} is {value}, not a finite number"
    return f"{name} is larger than 2^63" if isinstance(value, int) and abs(value) >= 1 << 63 else ""


def _kind(value: Any) -> str:
    return "null" if value is None else "a list" if isinstance(value, list) else "an object"
