"""What the manifest of a checkpoint says: workers write and read it, and schedulers read which contents it names."""

from __future__ import annotations

import logging
from typing import Final, Literal

import msgspec

from moorage.bus.errors import StreamGap
from moorage.bus.object_store import Content, ObjectInfo, ObjectStore
from moorage.schemas.unreadable import UNREADABLE

#: header of a manifest
SET_HEADER: Final = "Moorage-Set"
#: bytes of the largest one
MANIFEST_BYTES_MAX: Final = 64 << 20

Kind = Literal["file", "folder", "link"]

log = logging.getLogger("moorage.bus")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A file, folder or link of a set; `path` is below its folder. `stored_ms` is when its content was sent."""

    path: str
    kind: Kind
    mode: int
    mtime_ns: int
    size: int = 0
    target: str = ""
    content: Content | None = None
    stored_ms: int = 0


class Manifest(msgspec.Struct, frozen=True):
    """A set, as of `at_ms` (Unix time, by its worker's clock). `step` is what its job calls its step, if it says so.

    A checkpoint that is a file has its name in `file`, and that entry alone; one that is a link has in `link` where it
    leads, and the entries are those of what is there.
    """

    at_ms: int
    entries: list[Entry]
    step: int | None = None
    v: int = 1
    file: str = ""
    link: str = ""

    @property
    def signature(self) -> frozenset[tuple[str, str, int, int, int, str]]:
        """What tells whether a folder has changed."""
        return frozenset((e.path, e.kind, e.mode, e.mtime_ns, e.size, e.target) for e in self.entries)

    @property
    def contents(self) -> dict[str, Content]:
        """The contents of its files, by name."""
        return {e.content.nuid: e.content for e in self.entries if e.content is not None}

    @property
    def oldest_ms(self) -> int:
        """When what was stored first was stored."""
        return min((e.stored_ms for e in self.entries if e.content is not None), default=self.at_ms)


encode_manifest: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Manifest).decode


async def read_manifest(store: ObjectStore, name: str, info: ObjectInfo) -> Manifest | None:
    """Return the manifest that is this object; None if it is none, or not whole and sound. Raises BusError."""
    if SET_HEADER not in info.headers or info.size > MANIFEST_BYTES_MAX:
        return None
    try:
        return _decode(b"".join([piece async for piece in store.get(info)]))
    except (*UNREADABLE, StreamGap) as error:
        log.warning("the checkpoint %s cannot be read: %s", name, error)
        return None
