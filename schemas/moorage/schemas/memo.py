"""A cache of computed values, within a bound."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """A dict of at most `most` values that can be computed again: it is emptied when one more would not fit.

    So it needs no order of use, and costs what a dict costs. `put` is the only way in.
    """

    __slots__ = ("__weakref__", "most")

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def put(self, key: K, value: V) -> V:
        """Keep a value; return it."""
        if len(self) >= self.most and key not in self:
            self.clear()
        self[key] = value
        return value
