"""How many functions a piece of code calls: a cost that a busy machine does not change."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Calls:
    """Counts calls, of Python and of C, that are made inside the functions it wraps."""

    made: int = 0

    def inside(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function, counting what it calls."""

        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            before = sys.getprofile()
            sys.setprofile(self._count)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(before)

        return counted

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            self.made += 1
