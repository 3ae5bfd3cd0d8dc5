"""The data of calls that come in parts: too large for one message, they go to a file in the member's folder."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moorage.calls.member import Call
from moorage.schemas.service import EXPIRED, INPUT, INPUT_BYTES_DEFAULT, INPUT_REFUSED, PARTS_AHEAD

#: a caller that sends no part for so long, in seconds, is given up
SILENCE_S: Final = 30.0
#: more digits are no number of a part or of bytes
_DIGITS_MAX: Final = 12
_NOT_KEPT: Final = "the data of the call cannot be kept"


class BadPart(Exception):
    """The data of a call cannot be taken: `error` is what its caller is answered, and the message says why."""

    def __init__(self, error: str, why: str) -> None:
        super().__init__(why)
        self.error = error


@dataclass(eq=False)
class Input:
    """The data of one call, as far as they have come. `parts` and `bytes` count them."""

    call: Call
    path: Path
    bytes_all: int
    left_ms: int
    timer: asyncio.TimerHandle | None = None
    parts: int = 0
    bytes: int = 0

    @property
    def is_whole(self) -> bool:
        return self.bytes == self.bytes_all


class Inputs:
    """The data that one member receives, by the number of the call, and the files of those that run.

    `on_silence` is called with the number of a call whose caller sends nothing for `SILENCE_S`. The files are in
    `folder`, or else where the member runs.
    """

    def __init__(
        self, on_silence: Callable[[int], None], bytes_max: int = INPUT_BYTES_DEFAULT, folder: Path | None = None
    ) -> None:
        self.bytes_max = bytes_max
        self._on_silence = on_silence
        self._folder = folder or Path.cwd()
        self._coming: dict[int, Input] = {}
        self._files: dict[int, Path] = {}

    def begin(self, number: int, call: Call, left_ms: int) -> int:
        """Wait for the parts of a call; return the number of the last one that its caller may send now. Raises BadPart
        if there are too many bytes, or no file can be made."""
        size = number_of(call.headers.get(INPUT))
        if size is None or size > self.bytes_max:
            found = call.headers[INPUT][:_DIGITS_MAX]
            raise BadPart(INPUT_REFUSED, f"the data of the call have {found} bytes, allowed are {self.bytes_max}")
        path = self._folder / f".moorage-input-{secrets.token_hex(8)}"
        try:
            path.touch(0o600, exist_ok=False)
        except OSError as error:
            raise BadPart(INPUT_REFUSED, f"{_NOT_KEPT}: {error.strerror}") from None
        self._files[number] = path
        self._coming[number] = coming = Input(call, path, size, left_ms)
        self._listen(number, coming)
        return PARTS_AHEAD

    def take(self, number: int, part: int | None, data: bytes) -> Input | None:
        """Keep a part; return what has come of its call, None for a call that receives nothing. Raises BadPart, and
        forgets the call."""
        coming = self._coming.get(number)
        if coming is None:
            return None
        error, why = "", ""
        if part != coming.parts + 1:
            error, why = EXPIRED, f"part {part} of the data came in place of part {coming.parts + 1}"
        elif coming.bytes + len(data) > coming.bytes_all or not data:
            error, why = INPUT_REFUSED, f"the data have other than {coming.bytes_all} bytes"
        else:
            try:
                with coming.path.open("ab") as file:
                    file.write(data)
            except OSError as failed:
                error, why = INPUT_REFUSED, f"{_NOT_KEPT}: {failed.strerror}"
        if error:
            self.forget(number)
            raise BadPart(error, why)
        coming.parts += 1
        coming.bytes += len(data)
        if coming.is_whole:
            self._stop(number)
        else:
            self._listen(number, coming)
        return coming

    def forget(self, number: int) -> None:
        """Delete what came of a call."""
        self._stop(number)
        path = self._files.pop(number, None)
        if path is not None:
            path.unlink(missing_ok=True)

    def forget_coming(self, number: int) -> bool:
        """Delete what came of a call, unless the program has it; return whether its data were still coming."""
        was_coming = number in self._coming
        if was_coming:
            self.forget(number)
        return was_coming

    def drop_incomplete(self) -> list[int]:
        """Delete all data that are not whole; return the numbers of their calls, of which the program knows nothing."""
        return [number for number in list(self._coming) if self.forget_coming(number)]

    def close(self) -> None:
        """Delete everything."""
        for number in list(self._files):
            self.forget(number)

    def _stop(self, number: int) -> None:
        coming = self._coming.pop(number, None)
        if coming is not None and coming.timer is not None:
            coming.timer.cancel()

    def _listen(self, number: int, coming: Input) -> None:
        if coming.timer is not None:
            coming.timer.cancel()
        coming.timer = asyncio.get_running_loop().call_later(SILENCE_S, self._on_silence, number)


def number_of(text: str | None) -> int | None:
    """Return the number in a header; None for a header that is missing or none."""
    is_number = text is not None and text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
    return int(text) if text is not None and is_number else None


def file_name(path: Path) -> str:
    """Return a path as the program gets it, which may have another folder as its own."""
    return os.fspath(path.absolute())
