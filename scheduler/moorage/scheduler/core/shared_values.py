"""Values that live as long as somebody keeps them: what a `WeakValueDictionary` can hold."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class SharedDict(dict[Key, Value]):
    """A dict, and nothing beyond one."""


class SharedCount:
    """A number that those who keep it see grow."""

    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0
