"""Waits between tries, each twice as long as the one before, up to a bound."""

from __future__ import annotations


class Backoff:
    """The waits of one loop that tries again: `first_s`, twice that, and so on, at most `most_s`, all in seconds.

    They have no jitter. Where many processes try at once, as for a server that comes back, tenacity waits at random.
    """

    __slots__ = ("_first_s", "_most_s", "_s")

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = self._s = first_s
        self._most_s = most_s

    @property
    def coming_s(self) -> float:
        """The next wait."""
        return self._s

    def next_s(self) -> float:
        """Return the next wait; the one behind it is twice as long."""
        wait_s = self._s
        self._s = min(2 * wait_s, self._most_s)
        return wait_s

    def reset(self) -> None:
        """Begin anew with the first wait: a try has succeeded."""
        self._s = self._first_s
