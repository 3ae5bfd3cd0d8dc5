"""Values that live as long as somebody keeps them: what a `WeakValueDictionary` can hold."""

from __future__ import annotations


class SharedCount:
    """A number that those who keep it see grow."""

    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0
