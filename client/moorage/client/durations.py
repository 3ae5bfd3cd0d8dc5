"""Read durations that callers give, and format durations for display."""

from __future__ import annotations

import re
import time

from moorage.client.errors import rejected
from moorage.schemas.job import DURATION_S_MAX
from moorage.schemas.units import age as age
from moorage.schemas.units import duration_s

#: seconds, or text as `seconds` reads it
Duration = float | str


def seconds(duration: Duration) -> float:
    """Return the seconds of `90`, `"90"`, `"1h30m"` or `"500ms"`; 0..366 days. Raises `Rejected` for anything else."""
    if isinstance(duration, str):
        try:
            value = duration_s(duration)
        except ValueError:
            value = -1.0
    else:
        value = float(duration)
    if not 0 <= value <= DURATION_S_MAX:
        raise rejected(
            "invalid-argument",
            f"not a duration: {duration!r}",
            found=str(duration),
            allowed="0s..366d",
            next=_of_clock(duration) or "write it as 90s, 10m, 1h30m or 2d",
        )
    return value


def _of_clock(duration: Duration) -> str:
    """Return how a duration of Slurm, as `1-12:00:00`, is written here; "" for any other."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", str(duration))
    parts = zip(found.groups("0"), "dhms", strict=True) if found is not None else ()
    ours = "".join(f"{int(number)}{unit}" for number, unit in parts if int(number))
    return f"write it as {ours}" if ours else ""


def exact(seconds: float) -> str:
    """Return seconds as text that `seconds` reads back, to the ms: `1h30m32s`, `500ms`; `0s` for 0."""
    left, parts = round(seconds * 1000), []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        if number := left // size:
            parts.append(f"{number}{unit}")
            left -= number * size
    return "".join(parts) or "0s"


def utc(milliseconds: float) -> str:
    """Return milliseconds since 1970 as `2026-11-20T11:36:02Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(milliseconds / 1000))
