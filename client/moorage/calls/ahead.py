"""The calls that a program has ahead: sent before they have a place, so that the next one begins without a round trip.

The number of each is in a pipe that the program inherits. Who takes the number out has the call: the program, which
begins it, or the member, which takes it back as another one may run it sooner.
"""

from __future__ import annotations

import os
from typing import Final

_BYTES: Final = 8


class Ahead:
    """The pipe, at its member. `theirs` is the end for the program."""

    def __init__(self) -> None:
        self.theirs, self._ours = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.theirs)
        os.close(self._ours)

    def put(self, number: int) -> None:
        """Give a call to the program. Numbers grow. Raises BlockingIOError once it has left thousands in the pipe."""
        os.write(self._ours, number.to_bytes(_BYTES, "little"))

    def take_back(self) -> list[int]:
        """Return the calls that the program has not taken, and will not take any more."""
        numbers = []
        while number := _taken(self.theirs):
            numbers.append(number)
        return numbers


class Given:
    """The pipe, at the program."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd
        self._number = 0

    def take(self, number: int) -> bool:
        """Take a call to begin it; return False if it was taken back."""
        while self._number < number:
            if not (taken := _taken(self._fd)):
                return False
            self._number = taken
        return self._number == number


def _taken(fd: int) -> int:
    """Return the next number of the pipe; 0 if there is none."""
    try:
        return int.from_bytes(os.read(fd, _BYTES), "little")
    except BlockingIOError:
        return 0
