"""One bound in bytes for all that a client holds of events and output, until its readers take it."""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

#: bytes of one client
BYTES_MAX: Final = 256 * 1024 * 1024
#: what the output that `run` collects leaves free for whatever waits for a reader
SPARE_BYTES: Final = BYTES_MAX // 4

T = TypeVar("T")


class Budget:
    """The bytes that a client may still hold. Not thread-safe."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.left = bytes_max

    def take(self, size: int, spare: int = 0) -> bool:
        """Reserve `size` bytes; return False, and reserve none, if fewer than `spare` bytes would be left."""
        if self.left - size < spare:
            return False
        self.left -= size
        return True

    def give(self, size: int) -> None:
        """Return bytes that were reserved."""
        self.left += size


class Held(Generic[T]):
    """Items that wait for their reader, each with its size in bytes."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._items: deque[tuple[T, int]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, size: int) -> bool:
        """Add an item; return False if the client holds too much."""
        if not self._budget.take(size):
            return False
        self._items.append((item, size))
        return True

    def put_always(self, item: T, size: int) -> None:
        """Add an item even if the client holds too much, so that the next one is refused."""
        self._budget.give(-size)
        self._items.append((item, size))

    def put_and_drop(self, item: T, size: int) -> None:
        """Add an item. If the client holds too much, the oldest items here are dropped first, and the item last."""
        while not self.put(item, size) and self._items:
            self.take()

    def take(self) -> T:
        """Remove and return the oldest item."""
        item, size = self._items.popleft()
        self._budget.give(size)
        return item

    def take_all(self) -> list[T]:
        """Remove and return all items."""
        return [self.take() for _ in range(len(self._items))]
