"""A bounded cache for computed values."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """A dict of at most `most` values that can be computed again. When one more would not fit, all are removed.

    So it needs no order of use, and is as fast as a dict. Add values with `put` alone.
    """

    __slots__ = ("__weakref__", "most")

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def put(self, key: K, value: V) -> V:
        """Keep a value, and return it."""
        if len(self) >= self.most and key not in self:
            self.clear()
        self[key] = value
        return value
