"""Read the log of one of podman's containers from its file, where each line has a time, a stream, and whether it ends.

Podman's service reads the same file when it follows a log, and loses lines there: see the record of containers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, Self

from moorage.worker.drivers.container.engine import Piece

_READ_BYTES: Final = 256 * 1024
#: time, stream, F for a line or P for a part of one, and the text, as conmon writes them
_WORDS: Final = 4


class LogFile:
    """The file of one log, which its writer replaces by an empty one when it is full."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self) -> Iterator[Piece]:
        """Yield what was written since the last time, without a line that is only half written. Raises OSError."""
        while True:
            if self._descriptor < 0:
                try:
                    self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                except FileNotFoundError:  # it is not written to yet
                    return
            yield from self._rest_of_it()
            if not self._is_replaced():
                return
            yield from self._rest_of_it()  # what its writer wrote between our last look at it and its replacement
            self._close()

    def _rest_of_it(self) -> Iterator[Piece]:
        while data := os.read(self._descriptor, _READ_BYTES):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if (piece := _piece(line)) is not None:
                    yield piece

    def _is_replaced(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        self._rest = b""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _piece(line: bytes) -> Piece | None:
    words = line.split(b" ", _WORDS - 1)
    if len(words) != _WORDS:
        return None
    stamp, stream, kind, text = words
    return Piece(stream == b"stderr", stamp.decode("ascii", "replace"), text if kind == b"P" else text + b"\n")
