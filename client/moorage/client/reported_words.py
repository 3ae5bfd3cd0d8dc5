"""What jobs report of themselves while they run, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moorage.schemas.frames.reported import Value

_DIGITS: Final = 6


def value_words(value: Value) -> str:
    """Return a value as it is shown: numbers with six digits."""
    return (
        f"{value:.{_DIGITS}g}"
        if isinstance(value, float)
        else str(value).lower()
        if value in (True, False)
        else str(value)
    )


def reported_words(values: Mapping[str, Value]) -> str:
    """Return the values in a line: `step=1200 loss=0.31`."""
    return " ".join(f"{name}={value_words(value)}" for name, value in values.items())
