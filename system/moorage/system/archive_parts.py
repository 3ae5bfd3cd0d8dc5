"""Parts of a large archive of files, each stored once by its digest: a changed file sends the parts that have it.

An archive is cut between members, so a part is one large file, or some small ones. Where it is cut depends on names and
sizes nearby alone, so an added file changes few parts. An object with the list of parts stands in place of the archive,
under the same address: the SHA-256 of the whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import IO, Final, NamedTuple

import msgspec

#: header of the object with the list: how many parts there are
PARTS_HEADER: Final = "Moorage-Parts"
#: an archive below this size is one object
SPLIT_BYTES_MIN: Final = 8 << 20
#: so large a file has a part of its own, and the parts of smaller files have about as much, and at most the other bound
PART_BYTES_MIN: Final = 2 << 20
PART_BYTES_MAX: Final = 16 << 20
#: parts of one archive, and bytes of the list
PARTS_MAX: Final = 8_192
LIST_BYTES_MAX: Final = 1 << 20
#: of the names behind a part that is large enough, one in so many begins the next one
_ONE_IN: Final = 8
_READ_BYTES: Final = 1 << 20


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tar file: its SHA-256 in hex, and its bytes, neither compressed."""

    digest: str
    size: int


class Member(NamedTuple):
    """A member of a tar file: where its header begins, and the bytes of its content."""

    name: str
    at: int
    size: int


encode_parts: Final = msgspec.json.Encoder().encode
#: raises `msgspec.DecodeError`
decode_parts: Final = msgspec.json.Decoder(list[Part]).decode


def part_object(digest: str) -> str:
    """Return the name of the object with this part."""
    return f"part.{digest}"


def ends_of(members: Sequence[Member], size: int) -> list[int]:
    """Return where the parts of a tar file of so many bytes end."""
    ends, begin, was_large = list[int](), 0, False
    for member in members if size >= SPLIT_BYTES_MIN else ():
        held, is_large = member.at - begin, member.size >= PART_BYTES_MIN
        cuts = is_large or was_large or held >= PART_BYTES_MAX or (held >= PART_BYTES_MIN and _begins(member.name))
        if held and cuts and len(ends) < PARTS_MAX - 1:
            ends.append(member.at)
            begin = member.at
        was_large = is_large
    return [*ends, size]


def read_parts(file: IO[bytes], ends: Iterable[int]) -> tuple[str, tuple[Part, ...]]:
    """Return the SHA-256 of a file, in hex, and its parts. Raises OSError."""
    whole, parts, at = hashlib.sha256(), list[Part](), 0
    file.seek(0)
    for end in ends:
        own, begin = hashlib.sha256(), at
        while at < end and (piece := file.read(min(_READ_BYTES, end - at))):
            whole.update(piece)
            own.update(piece)
            at += len(piece)
        parts.append(Part(own.hexdigest(), at - begin))
    return whole.hexdigest(), tuple(parts)


class Slice:
    """A part of a file as a file of its own, as far as `archives.compressed` needs it."""

    def __init__(self, file: IO[bytes], at: int, size: int) -> None:
        self._file = file
        self._begin = at
        self._size = size
        self._at = 0

    def seek(self, place: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = place + (self._size if whence == os.SEEK_END else 0)
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = self._size - self._at
        self._file.seek(self._begin + self._at)
        piece = self._file.read(left if size < 0 else min(size, left))
        self._at += len(piece)
        return piece


def _begins(name: str) -> bool:
    return hashlib.sha256(os.fsencode(name)).digest()[0] % _ONE_IN == 0
