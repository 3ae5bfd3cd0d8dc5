"""Fields that are in every answer, whatever their value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def always(make: Callable[[], T]) -> T:
    """Return a field that is sent also if it has its default, `make()`; a client reads the default where it is absent.

    With `omit_defaults`, msgspec leaves out a default, but never the result of a function that it does not know.
    """
    field: Any = msgspec.field(default_factory=lambda: make())
    made: T = field
    return made


def nothing() -> None:
    """Return the default of a field that is sent as null."""
