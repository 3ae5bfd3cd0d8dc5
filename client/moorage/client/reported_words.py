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


def reported_words(values: Mapping[str, Value], *, of_several: bool = False) -> str:
    """Return the values in a line: `step=1200 loss=0.31`. Of a job of several replicas it says whose they are."""
    text = " ".join(f"{name}={value_words(value)}" for name, value in values.items())
    return f"{text} (of its first replica that reports)" if text and of_several else text
