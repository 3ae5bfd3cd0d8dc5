"""Durations, sizes and counts as people write them: `1h30m`, `500ms`, `10GiB`, `500MB`, `2,000 workers`."""

from __future__ import annotations

import re
from typing import Final

DURATION_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"\d+(?:\.\d+)?(?:ms|[smhd])(?: ?\d+(?:\.\d+)?(?:ms|[smhd]))*", re.ASCII)
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kKMGT]i?)?B?)", re.ASCII)
_NUMBER: Final = re.compile(r"-?\d*\.?\d+(?:e[+-]?\d{1,3})?", re.ASCII)
_POWERS: Final = "KMGT"


def duration_s(text: str) -> float:
    """Return the seconds of `90s`, `1h30m`, `1h 30m`, `500ms`, or of a bare number of seconds, which may be negative.

    Raises ValueError for anything else.
    """
    text = text.strip()
    if _DURATION.fullmatch(text):
        return sum(float(number) * DURATION_S[unit] for number, unit in _PART.findall(text))
    if not _NUMBER.fullmatch(text):
        raise ValueError("write it with ms, s, m, h or d, as 90s, 1h30m or 1h 30m")
    return float(text)


def size_bytes(text: str) -> int:
    """Return the bytes of `10GiB` (binary), `500MB` (decimal), or of a bare number of bytes; fractions are rounded.
    Raises ValueError."""
    matched = _SIZE.fullmatch(text.strip())
    if matched is None:
        raise ValueError("write it with KiB, MiB, GiB or TiB, or with kB, MB, GB or TB")
    word = (matched[2] or "").upper()
    factor = (1024 if word.endswith("I") else 1000) ** (_POWERS.index(word[0]) + 1) if word else 1
    try:
        return round(float(matched[1]) * factor)
    except OverflowError:
        raise ValueError("so many bytes, in KiB, MiB, GiB or TiB, are on no machine") from None


def many(number: int, word: str) -> str:
    """Return a count with its word, as `1 worker` or `2,000 workers`, for words whose plural ends in s."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def age(milliseconds: float | None) -> str:
    """Return milliseconds as text: `850ms`, `12s`, `3m12s`, `2h10m`, `3d4h`; `-` for None. A minus sign is dropped."""
    if milliseconds is None:
        return "-"
    if 0 <= milliseconds < 1000:
        return f"{int(milliseconds)}ms"
    left = int(abs(milliseconds) // 1000)
    for unit, size, next_unit, next_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if left >= size:
            rest = left % size // next_size
            return f"{left // size}{unit}" + (f"{rest}{next_unit}" if rest else "")
    return f"{left}s"
